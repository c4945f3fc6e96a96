"""What a GGUF file says of itself, read in milliseconds: the package gguf takes seconds for the words of a tokenizer.

Lists of strings and numbers are skipped unless they are asked for. The format: a magic number, a version, the numbers
of tensors and fields, the fields, then of every tensor its name, dims from the innermost, type and place.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numadist.errors import ShardError

_MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
# struct's letters of the types of fields, by their numbers; 8 is a string, 9 a list.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_MOST_DIMS = 4  # ggml's GGML_MAX_DIMS


@dataclass(frozen=True)
class GgufTensor:
    """shape: as the file has it, from the innermost dim. tensor_type: the package gguf's GGMLQuantizationType."""

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    n_bytes: int
    data_offset: int

    @property
    def block_bytes(self) -> int:
        """Of a block of numbers."""
        from gguf.constants import GGML_QUANT_SIZES

        return int(GGML_QUANT_SIZES[self.tensor_type][1])


@dataclass(frozen=True)
class GgufHeader:
    """fields: single values by their keys. lists: their entries, or how many they are where those were skipped."""

    fields: dict[str, Any]
    lists: dict[str, list[Any] | int]
    tensors: list[GgufTensor]


def read_header(path: str | Path, wanted: Callable[[str], bool] = lambda key: False) -> GgufHeader:
    """wanted: whether the list of a key is read. Raises: ShardError for no GGUF file, or one that is cut off."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, wanted).header()
    except (struct.error, UnicodeDecodeError, KeyError, IndexError, OverflowError) as e:
        raise ShardError(
            f"{path} is no GGUF file: its header cannot be read: {type(e).__name__}: {e}"
        ) from None
    except (OSError, ValueError) as e:
        raise ShardError(f"{path} is no GGUF file: {e}") from None


class _Reader:
    def __init__(self, data: mmap.mmap, wanted: Callable[[str], bool]):
        self.data, self.wanted, self.at = data, wanted, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        fields: dict[str, Any] = {}
        lists: dict[str, list[Any] | int] = {}
        for _ in range(num_fields):
            key, kind = self.string(), self.number("I")
            if kind == _LIST:
                lists[key] = self.list(self.wanted(key))
            else:
                fields[key] = self.value(kind)
        listed = [self.tensor() for _ in range(num_tensors)]
        step = int(fields.get(_ALIGNMENT, 32))
        if step <= 0:
            raise ValueError(f"{_ALIGNMENT} is {step}")
        place = 0
        for name, _, _, size, at in listed:
            if at != place:
                raise ValueError(f"{name} is said to lie at {at}, the tensor before it ends at {place}")
            place += -(-size // step) * step
        start = -(-self.at // step) * step
        tensors = [GgufTensor(name, shape, kind, size, start + at) for name, shape, kind, size, at in listed]
        if any(t.data_offset + t.n_bytes > len(self.data) for t in tensors):
            raise ValueError("it is cut off")
        return GgufHeader(fields, lists, tensors)

    def number(self, letter: str) -> Any:
        (found,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += struct.calcsize(f"<{letter}")
        return found

    def string(self) -> str:
        begin = self.skip_string()
        return self.data[begin : self.at].decode()

    def value(self, kind: int) -> Any:
        return self.string() if kind == _STRING else self.number(_SCALARS[kind])

    def list(self, is_wanted: bool) -> list[Any] | int:
        """The entries, or their number."""
        of, count = self.number("I"), self.number("Q")
        if of == _LIST:
            inner = [self.list(is_wanted) for _ in range(count)]
            return inner if is_wanted else count
        if of == _STRING and not is_wanted:
            for _ in range(count):
                self.skip_string()
            return int(count)
        if of == _STRING:
            return [self.string() for _ in range(count)]
        letter = _SCALARS[of]
        begin, self.at = self.at, self.at + count * struct.calcsize(f"<{letter}")
        return list(struct.unpack_from(f"<{count}{letter}", self.data, begin)) if is_wanted else int(count)

    def skip_string(self) -> int:
        """Where its characters begin."""
        size, begin = self.number("Q"), self.at
        self.at += size
        if self.at > len(self.data):
            raise ValueError("it is cut off")
        return begin

    def tensor(self) -> tuple[str, tuple[int, ...], Any, int, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string()
        num_dims = self.number("I")
        if num_dims > _MOST_DIMS:
            raise ValueError(f"{name} has {num_dims} dims, at most {_MOST_DIMS} are known")
        shape = tuple(self.number("Q") for _ in range(num_dims))
        kind = GGMLQuantizationType(self.number("I"))
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[0] % block:
            raise ValueError(
                f"{name} has rows of {shape[0]} numbers in {kind.name}, whose blocks have {block}"
            )
        return name, shape, kind, math.prod(shape) // block * block_bytes, self.number("Q")
