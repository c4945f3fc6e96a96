"""Tensors as the core wants them: contiguous CPU memory, elements aligned to their size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from numadist.errors import CommError


def _refuse(t: Tensor) -> None:
    raise CommError(
        f"backend numa moves dense CPU tensors, got a {t.layout} tensor on {t.device}. "
        f"Move it with .cpu() / .to_dense(), or use another backend for that device."
    )


def _fits(t: Tensor) -> bool:
    return t.is_contiguous() and t.data_ptr() % t.element_size() == 0 and not (t.is_conj() or t.is_neg())


def readable(t: Tensor) -> Tensor:
    """The tensor itself if its memory can be read in one go, else a contiguous copy."""
    if not t.is_cpu or t.layout != torch.strided:
        _refuse(t)
    return (
        t
        if _fits(t)
        else t.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    )


def store(t: Tensor, values: Tensor) -> None:
    """t.copy_(values), also where autograd would refuse it: leaves, and inference tensors outside inference mode."""
    with torch.inference_mode() if t.is_inference() else torch.no_grad():
        t.copy_(values)


class StagedOutputs:
    """Where results go: straight into the tensors that fit, by way of a contiguous copy into the others."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def writable(self, t: Tensor, keep: bool = False) -> Tensor:
        """Memory for a result of t's shape and dtype; keep: it starts with t's values."""
        if not t.is_cpu or t.layout != torch.strided:
            _refuse(t)
        if _fits(t):
            return t
        if any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True)):
            raise CommError(
                f"a result cannot go into a tensor of shape {list(t.shape)} and strides {list(t.stride())}: several "
                f"elements of it share memory. Give it memory of its own with .clone()"
            )
        staged = torch.empty(t.shape, dtype=t.dtype)
        if keep:
            staged.copy_(t.detach())
        self._copies.append((t, staged))
        return staged

    def copy_back(self) -> None:
        """Copy staged results to where they belong."""
        for t, staged in self._copies:
            store(t, staged)


def same_dtype_and_size(what: str, tensors: Sequence[Tensor], dtype: torch.dtype, numel: int) -> None:
    """Raise CommError unless every tensor has this dtype and number of elements."""
    for i, t in enumerate(tensors):
        if t.dtype != dtype or t.numel() != numel:
            raise CommError(
                f"{what}: tensor {i} is {t.dtype} with {t.numel()} elements, the others {dtype} with "
                f"{numel}; all must be alike."
            )
