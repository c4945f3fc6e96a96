"""Operators for compiled graphs: one dispatcher call and one call of the core per collective.

`torch.library.Library`, because `custom_op` costs 20 us more a call. Groups go by name, as in torch's functional
collectives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from numadist._native import Norm, Op
from numadist.comm import registry
from numadist.comm.fused import AfterSum


def _all_reduce_(x: Tensor, group_name: str) -> None:
    """Sum x in place over a group of backend numa."""
    registry.find(group_name).all_reduce_(x, Op.SUM)


def _all_reduce_fake(x: Tensor, group_name: str) -> None:
    """In place: no new tensor, no new shape."""


def _reduce_scatter(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """[R * d0, ...] on every rank -> [d0, ...]: the sum over ranks of this rank's part."""
    out = _scattered(x, num_ranks)
    registry.find(group_name).reduce_scatter_(out, x, Op.SUM)
    return out


def _reduce_scatter_fake(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return _scattered(x, num_ranks)


def _scattered(x: Tensor, num_ranks: int) -> Tensor:
    return x.new_empty((x.shape[0] // num_ranks, *x.shape[1:]))


def _all_gather(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """[d0, ...] on every rank -> [R * d0, ...], in rank order."""
    out = _gathered(x, num_ranks)
    registry.find(group_name).all_gather_(out, x)
    return out


def _all_gather_fake(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return _gathered(x, num_ranks)


def _gathered(x: Tensor, num_ranks: int) -> Tensor:
    return x.new_empty((x.shape[0] * num_ranks, *x.shape[1:]))


def _all_reduce_add_(x: Tensor, residual: Tensor, bias: Tensor | None, group_name: str) -> None:
    """residual += sum of x over ranks + bias, in one pass."""
    registry.find(group_name).all_reduce_fused(x.contiguous(), residual, AfterSum(residual, bias))


def _all_reduce_add_fake(x: Tensor, residual: Tensor, bias: Tensor | None, group_name: str) -> None:
    """In place."""


def _all_reduce_add_norm(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    rms: bool,
    group_name: str,
) -> Tensor:
    """residual += sum of x over ranks + bias; returns its RMS or layer norm. One pass."""
    out = torch.empty_like(residual)
    norm = Norm.RMS if rms else Norm.LAYER
    after = AfterSum(residual, bias, weight, norm_bias, norm, eps)
    registry.find(group_name).all_reduce_fused(x.contiguous(), out, after)
    return out


def _all_reduce_add_norm_fake(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    rms: bool,
    group_name: str,
) -> Tensor:
    return torch.empty_like(residual)


# schema, what it does, what it returns of fake tensors
_OPERATORS: list[tuple[str, Callable[..., Tensor | None], Callable[..., Tensor | None]]] = [
    ("all_reduce_(Tensor(a!) x, str group_name) -> ()", _all_reduce_, _all_reduce_fake),
    (
        "reduce_scatter(Tensor x, int num_ranks, str group_name) -> Tensor",
        _reduce_scatter,
        _reduce_scatter_fake,
    ),
    ("all_gather(Tensor x, int num_ranks, str group_name) -> Tensor", _all_gather, _all_gather_fake),
    (
        "all_reduce_add_(Tensor x, Tensor(a!) residual, Tensor? bias, str group_name) -> ()",
        _all_reduce_add_,
        _all_reduce_add_fake,
    ),
    (
        "all_reduce_add_norm(Tensor x, Tensor(a!) residual, Tensor? bias, Tensor weight, Tensor? norm_bias, "
        "float eps, bool rms, str group_name) -> Tensor",
        _all_reduce_add_norm,
        _all_reduce_add_norm_fake,
    ),
]
_LIBRARY: Any = torch.library.Library("numadist", "DEF")  # type: ignore[no-untyped-call]  # torch types none of it
for _schema, _function, _fake in _OPERATORS:
    _name = _schema.split("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _function, "CPU")
    torch.library.register_fake(f"numadist::{_name}", _fake, lib=_LIBRARY)
