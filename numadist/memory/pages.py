"""Where the pages of a tensor really are, asked of the kernel."""

from collections import Counter

import torch
from torch import Tensor

from numadist import _native
from numadist.errors import PlacementError


def byte_range(t: Tensor) -> tuple[int, int]:
    """(address of the first byte, number of bytes to the end of the last element) of a dense CPU tensor."""
    if t.device.type != "cpu" or t.layout != torch.strided:
        raise PlacementError(f"only a dense CPU tensor has pages; got {t.layout} on {t.device}")
    if t.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), (last + 1) * t.element_size()


def page_nodes(t: Tensor) -> dict[int, int]:
    """{node: pages} of the pages a tensor lies on, by move_pages; one system call per 1024 pages.

    A page never touched has no node and is not counted, so compare with `num_pages` to prove placement.
    """
    counts = Counter(_native.page_nodes(*byte_range(t)))
    return {node: pages for node, pages in sorted(counts.items()) if node >= 0}


def num_pages(t: Tensor) -> int:
    """Number of pages a tensor lies on, wholly or in part."""
    return _native.num_pages(*byte_range(t))
