"""Read slices of a safetensors checkpoint straight into this rank's memory.

Format: 8 bytes length, a JSON header, then the tensors' bytes, row-major
(https://github.com/huggingface/safetensors, "Format").
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numadist.errors import ShardError
from numadist.kernels.quantized import Quantized
from numadist.sharding.placement import Cut, Shard, cut_size
from numadist.weights.checkpoint import Checkpoint
from numadist.weights.conversions import Conversion, renamed, stacks
from numadist.weights.packed_integers import Parts, Scheme, coded, take_apart
from numadist.weights.slices import BUFFER_BYTES, local_slice, pread, row_ranges, take

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
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


class _Entry:
    """Where one tensor lies."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int):
        self.path, self.dtype, self.shape, self.offset = path, dtype, shape, offset


class _Stack:
    """A tensor [N, ...] that lies in pieces: of each n some, which follow each other along dim 1."""

    def __init__(self, pieces: list[list[_Entry]]):
        self.pieces = pieces
        first = pieces[0]
        self.shape = (len(pieces), sum(piece.shape[0] for piece in first), *first[0].shape[1:])


class _Coded:
    """A quantized layer: its tensors by what they are called there."""

    def __init__(self, pieces: dict[str, _Entry]):
        self.pieces = pieces


class SafetensorsCheckpoint(Checkpoint):
    """A .safetensors file, or a folder with model.safetensors or model.safetensors.index.json and what it names.

    conversions: from the file's names and pieces to the model's (conversions.py). model: as Checkpoint takes it.
    scheme: how layers are quantized, if some are.
    """

    def __init__(
        self,
        path: str | Path,
        conversions: Sequence[Conversion] = (),
        model: torch.nn.Module | None = None,
        scheme: Scheme | None = None,
    ):
        super().__init__(path, model)
        self._entries |= _read_folder(self.path) if self.path.is_dir() else _read_header(self.path)
        self._entries = {renamed(name, conversions): entry for name, entry in self._entries.items()}
        for name, pieces in stacks(self._entries, conversions).items():
            self._entries[name] = _Stack([[self._entries.pop(piece) for piece in row] for row in pieces])
        self._scheme = scheme
        if scheme is not None:
            self._collect(scheme)

    def _collect(self, scheme: Scheme) -> None:
        """Make one entry of the tensors of each quantized layer."""
        end = f".{scheme.pieces[0]}"
        for layer in [name.removesuffix(end) for name in self._entries if name.endswith(end)]:
            found = {piece: self._entries.pop(f"{layer}.{piece}", None) for piece in scheme.pieces}
            self._entries[f"{layer}.weight"] = _Coded({k: v for k, v in found.items() if v is not None})

    def has_codes(self, name: str) -> bool:
        """By its tensors."""
        return isinstance(self._entries[name], _Coded)

    def read_codes(
        self, name: str, shape: tuple[int, ...], is_transposed: bool, rows: Cut | None
    ) -> Quantized | None:
        """As Checkpoint says; also None for codes that our layouts do not hold."""
        entry = self._entries[name]
        if not isinstance(entry, _Coded) or is_transposed or len(shape) != 2:
            return None
        outputs = None if rows is None else torch.tensor(_indices(rows))
        codes = coded(self._parts(entry, name), outputs)
        if codes is None:
            return None
        whole = shape if outputs is None else (len(outputs), shape[1])
        if (len(codes.codes), codes.in_features) != whole:
            raise ShardError(
                f"{self.path}: {name} has outputs and inputs {(len(codes.codes), codes.in_features)}, but the model's "
                f"parameter is {shape}; the checkpoint is for another model"
            )
        return codes

    def _parts(self, entry: _Coded, name: str) -> Parts:
        assert self._scheme is not None  # else there are no such entries
        pieces = {}
        for piece, found in entry.pieces.items():
            pieces[piece] = torch.empty(found.shape, dtype=found.dtype)
            _read(found, pieces[piece], [((0, size),) for size in found.shape])
        return take_apart(self._scheme, pieces, f"{self.path}: {name}")

    def read_into(self, out: Tensor, name: str, shard: Shard, rank: int) -> None:
        """Fill `out` with what `rank` holds of tensor `name`, converting to out's dtype.

        Peak memory besides `out`: one buffer of whole rows, 4 MiB or one row. Raises: ShardError for a wrong shape.
        """
        entry = self._entries[name]
        if isinstance(entry, _Coded):
            whole = self._parts(entry, name).widened()
            self._check_shape(out, name, tuple(whole.shape), shard, rank)
            out.copy_(local_slice(whole, shard, rank))
            return
        self._check_shape(out, name, entry.shape, shard, rank)
        cuts = [
            shard.dims[d].cuts[rank] if d in shard.dims else ((0, size),)
            for d, size in enumerate(entry.shape)
        ]
        if isinstance(entry, _Entry):
            _read(entry, out, cuts)
            return
        for target, n in zip(out, _indices(cuts[0]), strict=True):
            done = 0
            for piece, rows in _by_piece(cuts[1], [piece.shape[0] for piece in entry.pieces[n]]):
                count = cut_size(rows)
                _read(entry.pieces[n][piece], target[done : done + count], [rows, *cuts[2:]])
                done += count


def _read(entry: _Entry, out: Tensor, cuts: list[Cut]) -> None:
    """Fill `out` with a tensor's part, one cut a dim."""
    row_shape = entry.shape[1:]
    row_bytes = math.prod(row_shape) * entry.dtype.itemsize
    rows_per_read = max(1, BUFFER_BYTES // max(1, row_bytes))
    target = out if entry.shape else out.view(1)
    done = 0
    with open(entry.path, "rb", buffering=0) as file:
        for start, count in row_ranges(cuts[0] if cuts else ((0, 1),), rows_per_read):
            raw = pread(file.fileno(), entry.offset + start * row_bytes, count * row_bytes, entry.path)
            part = torch.frombuffer(raw, dtype=entry.dtype).view(count, *row_shape)
            for dim, cut in enumerate(cuts[1:], start=1):
                part = take(part, dim, cut)
            target[done : done + count].copy_(part)
            done += count


def _indices(cut: Cut) -> list[int]:
    return [i for start, stop in cut for i in range(start, stop)]


def _by_piece(cut: Cut, sizes: list[int]) -> Iterable[tuple[int, Cut]]:
    """The cut of pieces that follow each other, as (piece, cut inside it), in the cut's order."""
    for start, stop in cut:
        first = 0
        for piece, size in enumerate(sizes):
            inside = max(start - first, 0), min(stop - first, size)
            if inside[0] < inside[1]:
                yield piece, (inside,)
            first += size


def _read_folder(folder: Path) -> dict[str, _Entry]:
    """The tensors that the folder's checkpoint has: as in transformers, one file or an index; other files are none."""
    if (folder / SINGLE_FILE).exists():
        return _read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).exists():
        return _read_indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ShardError(f"{folder} has no .safetensors file")
    entries: dict[str, _Entry] = {}
    for file in files:
        found = _read_header(file)
        if twice := sorted(entries.keys() & found.keys()):
            raise ShardError(
                f"{folder} has {twice[0]} in {entries[twice[0]].path.name} and in {file.name}, and no {INDEX_FILE} "
                "that says which counts; name the file, or take the other one away"
            )
        entries |= found
    return entries


def _read_indexed(folder: Path) -> dict[str, _Entry]:
    """What the index names, each from the file it names."""
    try:
        file_of = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        files = {name: _read_header(folder / name) for name in sorted(set(file_of.values()))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ShardError(f"{folder / INDEX_FILE} is no index of safetensors files: {e!r}") from None
    if missing := sorted(name for name, file in file_of.items() if name not in files[file]):
        raise ShardError(f"{folder / INDEX_FILE} has {missing[0]} in {file_of[missing[0]]}, which has not")
    return {name: files[file][name] for name, file in file_of.items()}


def _read_header(path: Path) -> dict[str, _Entry]:
    """As the safetensors library does, which has tensors lie one behind the other and nothing else in the file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = dict(json.loads(file.read(length)))
        header.pop("__metadata__", None)
        places = {name: _place(name, info) for name, info in header.items()}
    except (OSError, TypeError, ValueError, struct.error) as e:
        raise ShardError(f"{path} is no safetensors file: {e}") from None
    at = 0
    for name, (begin, end) in sorted(places.items(), key=lambda item: item[1]):
        dtype = _DTYPES.get(header[name]["dtype"])
        if dtype is None:
            raise ShardError(f"{path}: {name} has dtype {header[name]['dtype']}, which numadist cannot read")
        num_bytes = math.prod(header[name]["shape"]) * dtype.itemsize
        if (begin, end) != (at, at + num_bytes):
            raise ShardError(
                f"{path} is damaged: {name} is said to lie at {begin} to {end}; the one before ends at {at}, and it "
                f"has {num_bytes} bytes"
            )
        at = end
    first = 8 + length
    if first + at > size:
        raise ShardError(f"{path} is truncated: {first + at - size} bytes missing at {size}")
    if first + at < size:
        raise ShardError(f"{path} is damaged: {size - first - at} bytes lie behind its tensors")
    return {
        name: _Entry(path, _DTYPES[info["dtype"]], tuple(info["shape"]), first + places[name][0])
        for name, info in header.items()
    }


def _place(name: str, info: Any) -> tuple[int, int]:
    """Begin and end of a tensor. Raises: ValueError if it is not described as the format says."""
    try:
        (begin, end), shape, dtype = info["data_offsets"], info["shape"], info["dtype"]
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (begin, end, *shape))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ValueError(f"{name} is described by {info}")
    return begin, end
