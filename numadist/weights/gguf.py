"""Read slices of a GGUF file straight into this rank's memory, de-quantised on the way.

The package gguf knows the quantised formats; transformers knows which tensor is which parameter
and how it was rearranged. Needs the extra `models`.
"""

import contextlib
import functools
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numadist.errors import ShardError
from numadist.kernels.quantized import Quantized
from numadist.sharding.placement import Cut, Shard
from numadist.weights import gguf_blocks
from numadist.weights.checkpoint import Checkpoint
from numadist.weights.gguf_header import read_header
from numadist.weights.slices import BUFFER_BYTES, local_slice, pread, row_ranges

# Types of tensors that are numbers one by one.
_PLAIN = {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}
# The two largest tensors of any model, which no architecture rearranges: read a few rows at a time.
_NEVER_REARRANGED = {"token_embd.weight", "output.weight"}


class GgufCheckpoint(Checkpoint):
    """The tensors of one GGUF file under the parameter names of `model`, whose parameters may be fake."""

    def __init__(self, path: str | Path, model: torch.nn.Module):
        """Raises: ShardError if the file is no GGUF file or for an architecture transformers cannot map."""
        super().__init__(path, model)
        if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("transformers") is None:
            raise ShardError(f"reading {path} needs the extra: pip install 'numadist[models]'")
        from transformers import modeling_gguf_pytorch_utils as mapping

        header = read_header(self.path)
        config: Any = getattr(model, "config", None)
        architecture = str(header.fields.get("general.architecture"))
        processor_class: Any = mapping.TENSOR_PROCESSORS.get(architecture, mapping.TensorProcessor)
        self._processor: Any = processor_class(config=config.to_dict() if config is not None else {})
        try:
            with _one_name_map():
                names = mapping.get_gguf_hf_weights_map(model, self._processor)
        except (NotImplementedError, AttributeError) as e:
            raise ShardError(
                f"{path}: its tensors cannot be matched with {type(model).__name__}: {e}"
            ) from None
        # Gates lie before what they weigh in parameters that have both; so do their names.
        for tensor in sorted(header.tensors, key=lambda t: t.name):
            # Parameters of experts are called without an end.
            name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                self._entries.setdefault(name, []).append(tensor)

    def read_into(self, out: Tensor, name: str, shard: Shard, rank: int) -> None:
        """Fill `out` with what `rank` holds of parameter `name`, converting to out's dtype.

        Peak memory besides `out`: the whole parameter in fp32, but of embedding and head only a few rows.
        Raises: ShardError for a wrong shape, or a parameter the file keeps in parts or together with others.
        """
        parts = self._entries[name]
        if parts[0].name in _NEVER_REARRANGED:
            self._check_shape(out, name, _shape(parts[0]), shard, rank)
            self._read_rows_into(out, parts[0], shard, rank)
            return
        done = [self._processor.process(weights=self._rows(p, 0, _num_rows(p)), name=p.name) for p in parts]
        if _joined_shape(parts) is None or any(part.name is None for part in done):
            raise ShardError(
                f"{self.path}: {name} is not one tensor of its own there ({parts[0].name}); load this model without "
                "weights="
            )
        full = torch.from_numpy(done[0].weights)
        if len(parts) > 1:
            full = torch.cat([torch.from_numpy(part.weights) for part in done], 1)
        self._check_shape(out, name, tuple(full.shape), shard, rank)
        out.copy_(local_slice(full, shard, rank))

    def has_codes(self, name: str) -> bool:
        """By its type."""
        return self._entries[name][0].tensor_type.name not in _PLAIN

    def read_codes(
        self, name: str, shape: tuple[int, ...], is_transposed: bool, rows: Cut | None
    ) -> Quantized | None:
        """As Checkpoint says; also None where transformers does more to the tensor than to put outputs in order."""
        parts = self._entries[name]
        stored = _joined_shape(parts)
        kinds = {part.tensor_type.name for part in parts}
        if len(kinds) > 1 or not kinds <= gguf_blocks.KINDS.keys() or stored is None or len(stored) == 1:
            return None
        *experts, num_out, num_in = stored
        if (*experts, *((num_in, num_out) if is_transposed else (num_out, num_in))) != shape:
            raise ShardError(
                f"{self.path}: {name} has shape {stored}, but the model's parameter is {shape}; the checkpoint is for "
                "another model"
            )
        order = self._joined_outputs(parts, is_transposed)
        if order is None:
            return None
        if rows is not None:
            order = torch.cat([order[start:stop] for start, stop in rows])
        codes = gguf_blocks.unpack(kinds.pop(), self._blocks(parts, order), num_in)
        if not codes.scale.isfinite().all():
            raise ShardError(
                f"{self.path}: {parts[0].name} has scales that are no numbers; the file is damaged"
            )
        return codes

    def _blocks(self, parts: list[Any], order: Tensor) -> Tensor:
        """Some rows as they are in the file, uint8 [N, B, bytes of a block]; order: counted through all parts."""
        found = torch.empty(len(order), _blocks_a_row(parts[0]), parts[0].block_bytes, dtype=torch.uint8)
        base = 0
        for part in parts:
            here = (order >= base) & (order < base + _num_rows(part))
            wanted = order[here] - base
            base += _num_rows(part)
            if len(wanted) > 0:
                first, count = int(wanted.min()), int(wanted.max() - wanted.min()) + 1
                raw = torch.frombuffer(self._raw(part, first, count), dtype=torch.uint8)
                found[here] = raw.view(count, *found.shape[1:])[wanted - first]
        return found

    def _joined_outputs(self, parts: list[Any], is_transposed: bool) -> Tensor | None:
        """As _outputs, of one tensor, or of experts, whose parts are joined within each; counted through all parts."""
        if len(_shape(parts[0])) == 2:
            return self._outputs(parts[0], is_transposed)
        joined, base = [], 0
        for part in parts:
            count = _num_rows(part)
            order = self._outputs(part, False)
            if order is None or not torch.equal(order, torch.arange(count)):
                return None
            joined.append((base + order).view(_shape(part)[0], -1))
            base += count
        return torch.cat(joined, 1).flatten()

    def _outputs(self, tensor: Any, is_transposed: bool) -> Tensor | None:
        """Which output of the file each of the parameter's is; None where the values change too."""
        num_out = _num_rows(tensor)
        if tensor.name in _NEVER_REARRANGED:
            return torch.arange(num_out)
        marked = torch.arange(2 * num_out, dtype=torch.float64).view(num_out, 2)
        done = self._processor.process(weights=marked.numpy(), name=tensor.name)
        if done.name is None:
            return None
        moved = torch.from_numpy(done.weights)
        if is_transposed:
            moved = moved.t()
        if moved.shape != marked.shape or not torch.equal(moved[:, 0] + 1, moved[:, 1]):
            return None
        order = (moved[:, 0] / 2).long()
        return order if torch.equal(order.sort()[0], torch.arange(num_out)) else None

    def _read_rows_into(self, out: Tensor, tensor: Any, shard: Shard, rank: int) -> None:
        rows = shard.dims[0].cuts[rank] if 0 in shard.dims else ((0, _num_rows(tensor)),)
        inner = Shard({dim: s for dim, s in shard.dims.items() if dim > 0})
        done = 0
        for start, count in row_ranges(rows, max(1, BUFFER_BYTES // (4 * _shape(tensor)[-1]))):
            block = torch.from_numpy(self._rows(tensor, start, count))
            out[done : done + count].copy_(local_slice(block, inner, rank))
            done += count

    def _rows(self, tensor: Any, start: int, count: int) -> Any:
        """Rows as fp32, of the shape the file says (a NumPy array: gguf and transformers work on those)."""
        import gguf
        import numpy as np

        raw = np.frombuffer(self._raw(tensor, start, count), dtype=np.uint8)
        values = gguf.dequantize(raw.reshape(count, -1), tensor.tensor_type)
        shape = _shape(tensor)
        return values.reshape(shape if len(shape) == 1 else (-1, *shape[1:]))

    def _raw(self, tensor: Any, start: int, count: int) -> bytearray:
        """Rows as they are in the file."""
        row_bytes = tensor.n_bytes // _num_rows(tensor)
        with open(self.path, "rb", buffering=0) as file:
            return pread(file.fileno(), tensor.data_offset + start * row_bytes, count * row_bytes, self.path)


@contextlib.contextmanager
def _one_name_map() -> Iterator[None]:
    """transformers has the package gguf make its table of names anew for every module of a model: 20 s of 400."""
    import gguf

    made = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(made)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = made


def _shape(tensor: Any) -> tuple[int, ...]:
    """Row-major; the file lists dims from the innermost."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _joined_shape(parts: list[Any]) -> tuple[int, ...] | None:
    """Of the parameter that these tensors make: several are projections of the same experts. None if they are not."""
    shapes = [_shape(part) for part in parts]
    if len(parts) == 1:
        return shapes[0]
    if any(len(shape) != 3 for shape in shapes) or not all("_exps." in part.name for part in parts):
        return None
    experts, inputs = {shape[0] for shape in shapes}, {shape[2] for shape in shapes}
    if len(experts) > 1 or len(inputs) > 1:
        return None
    return experts.pop(), sum(shape[1] for shape in shapes), inputs.pop()


def _blocks_a_row(tensor: Any) -> int:
    return int(tensor.n_bytes // (_num_rows(tensor) * tensor.block_bytes))


def _num_rows(tensor: Any) -> int:
    """A vector is one row: its blocks may cross any finer cut."""
    return math.prod(_shape(tensor)[:-1])
