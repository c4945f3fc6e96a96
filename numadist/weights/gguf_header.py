"""What a GGUF file says of itself, read in milliseconds: the package gguf takes seconds for the words of a tokenizer.

Lists of strings and numbers are skipped. The format: a magic number, a version, the numbers of tensors and fields,
the fields, then of every tensor its name, dims from the innermost, type and place.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numadist.errors import ShardError

_MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
# struct's letters of the types of fields, by their numbers; 8 is a string, 9 a list.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9


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
    """fields: single values by their keys; of lists their number of entries."""

    fields: dict[str, Any]
    tensors: list[GgufTensor]


def read_header(path: str | Path) -> GgufHeader:
    """Raises: ShardError for a file that is no GGUF file, or is cut off."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (struct.error, UnicodeDecodeError, KeyError, IndexError) as e:
        raise ShardError(
            f"{path} is no GGUF file: its header cannot be read: {type(e).__name__}: {e}"
        ) from None
    except (OSError, ValueError) as e:
        raise ShardError(f"{path} is no GGUF file: {e}") from None


class _Reader:
    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self.string()
            fields[key] = self.value(self.number("I"))
        listed = [self.tensor() for _ in range(num_tensors)]
        step = int(fields.get(_ALIGNMENT, 32))
        start = -(-self.at // step) * step
        tensors = [GgufTensor(name, shape, kind, size, start + at) for name, shape, kind, size, at in listed]
        if any(t.data_offset + t.n_bytes > len(self.data) for t in tensors):
            raise ValueError("it is cut off")
        return GgufHeader(fields, tensors)

    def number(self, letter: str) -> Any:
        (found,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += struct.calcsize(f"<{letter}")
        return found

    def string(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        """The value of a field; of a list, how many it has."""
        if kind == _STRING:
            return self.string()
        if kind != _LIST:
            return self.number(_SCALARS[kind])
        of, count = self.number("I"), self.number("Q")
        if of in _SCALARS:
            self.at += count * struct.calcsize(f"<{_SCALARS[of]}")
        else:
            for _ in range(count):
                self.skip_string() if of == _STRING else self.value(of)
        return count

    def skip_string(self) -> None:
        self.at += 8 + int.from_bytes(self.data[self.at : self.at + 8], "little")

    def tensor(self) -> tuple[str, tuple[int, ...], Any, int, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string()
        shape = tuple(self.number("Q") for _ in range(self.number("I")))
        kind = GGMLQuantizationType(self.number("I"))
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[0] % block:
            raise ValueError(
                f"{name} has rows of {shape[0]} numbers in {kind.name}, whose blocks have {block}"
            )
        return name, shape, kind, math.prod(shape) // block * block_bytes, self.number("Q")
