"""Read slices of a safetensors checkpoint straight into this rank's memory.

A file is read with pread, never mapped: mapped pages would count as this process's memory, and stay on the node of
the process that touched them first. Format: 8 bytes length, a JSON header, then the tensors' bytes, row-major
(https://github.com/huggingface/safetensors, "Format").
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numadist.errors import ShardError
from numadist.shard.placement import Cut, Shard

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Rows are read this many bytes at a time: large enough for the disk, small beside any weight.
BUFFER_BYTES = 4 << 20


class _Entry:
    """Where one tensor lies."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int):
        self.path, self.dtype, self.shape, self.offset = path, dtype, shape, offset


class Checkpoint:
    """The tensors of a .safetensors file, or of a folder that holds one or several (a sharded checkpoint)."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not files:
            raise ShardError(f"{self.path} has no .safetensors file")
        self._entries: dict[str, Any] = {}
        for file in files:
            self._entries |= _read_header(file)

    def names(self) -> list[str]:
        return list(self._entries)

    def find(self, candidates: Iterable[str]) -> str:
        """The tensor one of these names means, also where the checkpoint has a prefix more or less.

        Raises: ShardError naming what was looked for.
        """
        wanted = list(candidates)
        for name in wanted:
            if name in self._entries:
                return name
        for name in wanted:
            near = [n for n in self._entries if n.endswith("." + name) or name.endswith("." + n)]
            if len(near) == 1:
                return near[0]
        raise ShardError(
            f"{self.path} has no tensor named {' or '.join(wanted)}; it has {len(self._entries)} others"
        )

    def read_into(self, out: Tensor, name: str, shard: Shard, rank: int) -> None:
        """Fill `out` with what `rank` holds of tensor `name`, converting to out's dtype.

        Peak memory besides `out`: one buffer of whole rows, 4 MiB or one row. Raises: ShardError for a wrong shape.
        """
        entry: _Entry = self._entries[name]
        self._check_shape(out, name, entry.shape, shard, rank)
        rows = shard.dims[0].cuts[rank] if 0 in shard.dims else ((0, entry.shape[0] if entry.shape else 1),)
        inner = Shard({d: s for d, s in shard.dims.items() if d > 0})
        row_shape = entry.shape[1:]
        row_bytes = math.prod(row_shape) * entry.dtype.itemsize
        rows_per_read = max(1, BUFFER_BYTES // max(1, row_bytes))
        target = out if entry.shape else out.view(1)
        done = 0
        with open(entry.path, "rb", buffering=0) as file:
            for start, count in pieces(rows, rows_per_read):
                raw = pread(file.fileno(), entry.offset + start * row_bytes, count * row_bytes, entry.path)
                block = torch.frombuffer(raw, dtype=entry.dtype).view(count, *row_shape)
                target[done : done + count].copy_(local_slice(block, inner, rank))
                done += count

    def _check_shape(self, out: Tensor, name: str, shape: tuple[int, ...], shard: Shard, rank: int) -> None:
        local = shard.local_shape(shape, rank)
        if local != tuple(out.shape):
            raise ShardError(
                f"{self.path}: {name} has shape {shape}, of which rank {rank} would hold {local}, "
                f"but the model's parameter is {tuple(out.shape)}; the checkpoint is for another model"
            )


def local_slice(full: Tensor, shard: Shard, rank: int) -> Tensor:
    """What `rank` holds of a tensor: views where the cut is one interval, else a concatenation."""
    part = full
    for dim, dim_shard in shard.dims.items():
        part = _take(part, dim, dim_shard.cuts[rank])
    return part


def _take(full: Tensor, dim: int, cut: Cut) -> Tensor:
    parts = [full.narrow(dim, start, stop - start) for start, stop in cut or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def pieces(rows: Cut, limit: int) -> Iterable[tuple[int, int]]:
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


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as e:
        raise ShardError(f"{path} is no safetensors file: {e}") from None
    entries = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(info["dtype"])
        if dtype is None:
            raise ShardError(f"{path}: {name} has dtype {info['dtype']}, which numadist cannot read")
        entries[name] = _Entry(path, dtype, tuple(info["shape"]), 8 + length + info["data_offsets"][0])
    return entries
