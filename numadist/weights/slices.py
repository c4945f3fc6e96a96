"""Parts of whole tensors, and reading parts of files.

Files are read with pread, never mapped: mapped pages would count as this process's memory, and stay on the node of
the process that touched them first.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from numadist.errors import ShardError
from numadist.sharding.placement import Cut, Shard

# Rows are read this many bytes at a time: large enough for the disk, small beside any weight.
BUFFER_BYTES = 4 << 20


def local_slice(full: Tensor, shard: Shard, rank: int) -> Tensor:
    """What `rank` holds of a tensor: views where the cut is one interval, else a concatenation."""
    part = full
    for dim, dim_shard in shard.dims.items():
        part = take(part, dim, dim_shard.cuts[rank])
    return part


def take(full: Tensor, dim: int, cut: Cut) -> Tensor:
    """The indices of a cut, along one dim."""
    parts = [full.narrow(dim, start, stop - start) for start, stop in cut or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def row_ranges(rows: Cut, limit: int) -> Iterable[tuple[int, int]]:
    """The rows as (first, count), at most `limit` at a time."""
    for start, stop in rows:
        for first in range(start, stop, limit):
            yield first, min(limit, stop - first)


def pread(fd: int, offset: int, num_bytes: int, path: Path) -> bytearray:
    """Exactly num_bytes of the file. Raises: ShardError if it ends before."""
    buffer = bytearray(num_bytes)
    view, done = memoryview(buffer), 0
    while done < num_bytes:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise ShardError(f"{path} is truncated: {num_bytes - done} bytes missing at {offset + done}")
        done += got
    return buffer
