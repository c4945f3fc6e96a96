"""Tensors whose pages lie on a chosen node."""

import functools
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numadist import _native
from numadist.errors import PlacementError
from numadist.memory import policy
from numadist.memory.pages import num_pages, page_nodes

# Transparent huge pages are 2 MiB on x86-64 and on arm64 with 4 KiB pages; smaller tensors cannot use one.
HUGE_PAGE_BYTES = 2 << 20


class _Pages:
    """Anonymous pages that numpy, and through it a tensor, can look at; unmapped with the last view."""

    def __init__(self, num_bytes: int, nodes: Sequence[int]):
        page = os.sysconf("SC_PAGESIZE")
        mapped = math.ceil(num_bytes / page) * page
        self.address = _native.map_memory(mapped)
        weakref.finalize(self, _native.unmap_memory, self.address, mapped)
        policy.bind(self.address, mapped, nodes)
        if mapped >= HUGE_PAGE_BYTES:
            policy.advise_huge_pages(self.address, mapped)
        policy.touch(self.address, mapped)
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def empty(shape: Sequence[int], dtype: torch.dtype, *, numa_node: int) -> Tensor:
    """Contiguous tensor of zeros in pages of its own on one node; the pages are freed with its storage.

    Raises: BindError if the node has no memory for us, PlacementError if the pages lie elsewhere after all.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    # from_numpy keeps the array, and the array keeps the pages.
    flat = torch.from_numpy(np.asarray(_Pages(num_bytes, [numa_node])))
    tensor = flat.view(dtype).view(tuple(shape))
    seen = page_nodes(tensor)
    if seen != {numa_node: num_pages(tensor)}:
        raise PlacementError(
            f"asked for {num_pages(tensor)} pages on node {numa_node}, the kernel put {seen} (node: pages); "
            f"the node may be out of memory."
        )
    return tensor


def clone(t: Tensor, *, numa_node: int) -> Tensor:
    """Contiguous copy of a tensor on one node. Raises: as `empty`."""
    copy = empty(t.shape, t.dtype, numa_node=numa_node)
    copy.copy_(t.detach())
    return copy


def patch_clone() -> None:
    """Make `t.clone(numa_node=i)` do what `clone(t, numa_node=i)` does; without numa_node, clone is as before.

    For the whole process; a second call changes nothing.
    """
    plain = Tensor.clone
    if hasattr(plain, "_numadist_plain"):
        return

    @functools.wraps(plain)
    def clone_on_node(self: Tensor, *args: Any, numa_node: int | None = None, **kwargs: Any) -> Tensor:
        return plain(self, *args, **kwargs) if numa_node is None else clone(self, numa_node=numa_node)

    clone_on_node._numadist_plain = plain  # type: ignore[attr-defined]
    Tensor.clone = clone_on_node  # type: ignore[method-assign,assignment]
