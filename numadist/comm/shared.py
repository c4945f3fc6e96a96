"""Tensors in memory that all ranks of a group have mapped: all_reduce sums them where they are."""

import errno
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from numadist import _native
from numadist.errors import CommError


class Region:
    """`stride` bytes of each rank, all mapped here; unmapped with the last tensor that looks at it."""

    def __init__(self, address: int, stride: int, rank: int, world: int, number: int):
        self.begin = address + rank * stride
        self.stride = stride
        self.rank = rank
        self.world = world
        self.number = number
        weakref.finalize(self, _native.unmap_memory, address, stride * world)

    def array(self, num_bytes: int) -> np.ndarray:
        """This rank's first bytes; the array keeps the region."""
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.begin, False),
            "version": 3,
        }
        return np.asarray(self)

    def holds(self, address: int, num_bytes: int) -> bool:
        return self.begin <= address and address + num_bytes <= self.begin + self.stride

    def everybodys(self, address: int) -> Any:
        """C array of the addresses of what is at `address` on this rank, of all ranks."""
        return _native.pointers(address + (rank - self.rank) * self.stride for rank in range(self.world))

    def id_of(self, address: int) -> int:
        """What ranks compare, so that none sums another tensor."""
        return (self.number * 1000003 + address - self.begin) & 0x7FFFFFFF


def empty_shared(shape: Sequence[int], dtype: torch.dtype, group: ProcessGroup | None = None) -> Tensor:
    """Tensor of zeros whose all_reduce needs no copy; every rank of the group calls this with the same arguments.

    Faster from 64 KiB on. All ranks must pass their tensor of the same call to an all_reduce; a view counts if it
    is at the same place on all ranks. Raises: CommError.
    """
    from numadist.comm.process_group import ShmGroup

    pg = group if group is not None else torch.distributed.group.WORLD
    if not isinstance(pg, ShmGroup):
        raise CommError(f"shared tensors need a group of backend numa, got {pg!r}")
    if not pg.shares_memory:
        raise CommError(f"shared tensors need ranks of one machine; {pg!r} has several")
    num_bytes = math.prod(shape) * dtype.itemsize
    page = os.sysconf("SC_PAGESIZE")
    stride = max(page, math.ceil(num_bytes / page) * page)
    region = _make_region(pg, stride)
    pg.add_region(region)
    flat = torch.from_numpy(region.array(stride))[:num_bytes]
    return flat.view(dtype).view(tuple(shape))


def _make_region(pg: Any, stride: int) -> Region:
    """All ranks map what rank 0 makes, or all raise."""
    rank, world = pg.rank(), pg.size()
    fd, code = -1, 0
    if rank == 0:
        try:
            fd = _native.create_region(world, stride, pg.nodes)
        except OSError as error:
            code = -(error.errno or errno.EIO)
    # Sizes differ: the broadcast of what rank 0 says is compared by all.
    place = torch.tensor([os.getpid(), fd, code, stride])
    pg.broadcast_(place, 0)
    address = 0
    pid, number, code, told = place.tolist()
    if code == 0 and told == stride:
        address, code = _map(f"/proc/{pid}/fd/{number}", stride * world)
    worst = torch.tensor([code if told == stride else -errno.EINVAL])
    pg.all_reduce_(worst, _native.Op.MIN)
    if rank == 0 and fd >= 0:
        os.close(fd)
    if worst.item() != 0:
        if address:
            _native.unmap_memory(address, stride * world)
        raise CommError(
            f"rank {rank}: no shared region of {stride} bytes a rank for {world} ranks: "
            f"{os.strerror(-int(worst.item()))}; this rank asked for {stride} bytes, rank 0 for {told}"
        )
    return Region(address, stride, rank, world, pg.next_region())


def _map(path: str, num_bytes: int) -> tuple[int, int]:
    """(address, 0) or (0, -errno)."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return 0, -(error.errno or errno.EIO)
    try:
        return _native.map_region(fd, num_bytes), 0
    except _native.NativeError:
        return 0, -errno.EPROTO
    finally:
        os.close(fd)
