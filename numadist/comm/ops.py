"""Operators for compiled graphs: one dispatcher call and one call of the core per collective.

`torch.library.Library`, because `custom_op` costs 20 us more a call. Groups go by name, as in torch's functional
collectives.
"""

import torch
from torch import Tensor

from numadist._native import Norm, Op
from numadist.comm import process_group

_LIBRARY = torch.library.Library("numadist", "DEF")
_LIBRARY.define("all_reduce_(Tensor(a!) x, str group_name) -> ()")
_LIBRARY.define("reduce_scatter(Tensor x, int num_ranks, str group_name) -> Tensor")
_LIBRARY.define("all_gather(Tensor x, int num_ranks, str group_name) -> Tensor")
_LIBRARY.define("all_reduce_add_(Tensor x, Tensor(a!) residual, Tensor? bias, str group_name) -> ()")
_LIBRARY.define(
    "all_reduce_add_norm(Tensor x, Tensor(a!) residual, Tensor? bias, Tensor weight, Tensor? norm_bias, "
    "float eps, bool rms, str group_name) -> Tensor"
)


@torch.library.impl(_LIBRARY, "all_reduce_", "CPU")
def _all_reduce_(x: Tensor, group_name: str) -> None:
    """Sum x in place over a group of backend numa."""
    process_group.find(group_name).all_reduce_(x, Op.SUM)


@torch.library.register_fake("numadist::all_reduce_", lib=_LIBRARY)
def _all_reduce_fake(x: Tensor, group_name: str) -> None:
    """In place: no new tensor, no new shape."""


@torch.library.impl(_LIBRARY, "reduce_scatter", "CPU")
def _reduce_scatter(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """[R * d0, ...] on every rank -> [d0, ...]: the sum over ranks of this rank's part."""
    out = _scattered(x, num_ranks)
    process_group.find(group_name).reduce_scatter_(out, x)
    return out


@torch.library.register_fake("numadist::reduce_scatter", lib=_LIBRARY)
def _reduce_scatter_fake(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return _scattered(x, num_ranks)


def _scattered(x: Tensor, num_ranks: int) -> Tensor:
    return x.new_empty((x.shape[0] // num_ranks, *x.shape[1:]))


@torch.library.impl(_LIBRARY, "all_gather", "CPU")
def _all_gather(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """[d0, ...] on every rank -> [R * d0, ...], in rank order."""
    out = _gathered(x, num_ranks)
    process_group.find(group_name).all_gather_(out, x)
    return out


@torch.library.register_fake("numadist::all_gather", lib=_LIBRARY)
def _all_gather_fake(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return _gathered(x, num_ranks)


def _gathered(x: Tensor, num_ranks: int) -> Tensor:
    return x.new_empty((x.shape[0] * num_ranks, *x.shape[1:]))


@torch.library.impl(_LIBRARY, "all_reduce_add_", "CPU")
def _all_reduce_add_(x: Tensor, residual: Tensor, bias: Tensor | None, group_name: str) -> None:
    """residual += sum of x over ranks + bias, in one pass."""
    process_group.find(group_name).all_reduce_fused(x.contiguous(), residual, residual=residual, bias=bias)


@torch.library.register_fake("numadist::all_reduce_add_", lib=_LIBRARY)
def _all_reduce_add_fake(x: Tensor, residual: Tensor, bias: Tensor | None, group_name: str) -> None:
    """In place."""


@torch.library.impl(_LIBRARY, "all_reduce_add_norm", "CPU")
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
    group = process_group.find(group_name)
    group.all_reduce_fused(
        x.contiguous(),
        out,
        residual=residual,
        bias=bias,
        weight=weight,
        norm_bias=norm_bias,
        norm=norm,
        eps=eps,
    )
    return out


@torch.library.register_fake("numadist::all_reduce_add_norm", lib=_LIBRARY)
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
