"""Norms of gradients over all ranks: `torch.nn.utils.clip_grad_norm_` on a sharded model's parameters.

A rank has a part of most gradients, so a norm over its own is another on every rank, and clipping by it would make
ranks drift apart. torch's own function is therefore given norms over the whole model as soon as one is sharded for
training; gradients of other parameters count as ever.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as torchs
from torch import Tensor

from numadist.pipeline.whole import only_counted
from numadist.sharding.placement import Shard

if TYPE_CHECKING:
    from numadist.pipeline.sharded_model import ShardedModel

_trained: "weakref.WeakSet[ShardedModel]" = weakref.WeakSet()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most max_norm; returns the norm before.

    As torch.nn.utils.clip_grad_norm_, which does the same for parameters of a model that numadist.shard(train=True)
    has made. Collective: every rank of the model's group calls it with the same parameters.
    """
    return torchs.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def count_over_ranks(model: "ShardedModel") -> None:
    """Have torch's norms of this model's gradients taken over all its ranks."""
    _trained.add(model)
    plain = torchs._get_total_norm
    if not hasattr(plain, "_numadist_plain"):
        counted = _counted(plain)
        torchs._get_total_norm = counted
        without_grad = torch.no_grad()(counted)
        torchs.get_total_norm = without_grad  # type: ignore[attr-defined]
        torch.nn.utils.get_total_norm = without_grad


def _counted(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        found = _owners(grads)
        if not any(found):
            return plain(grads, norm_type, error_if_nonfinite, foreach)
        return _norm(grads, found, float(norm_type), error_if_nonfinite)

    total_norm._numadist_plain = plain  # type: ignore[attr-defined]
    return total_norm


_Owner = tuple["ShardedModel", Shard] | None


def _owners(grads: list[Tensor]) -> list[_Owner]:
    """Of each gradient the model it belongs to and how its parameter is placed; None: of no sharded model."""
    known: dict[int, _Owner] = {}
    for model in _trained:
        for name, parameter in model.local.named_parameters():
            if parameter.grad is not None:
                known[id(parameter.grad)] = model, model.placement(name)
    return [known.get(id(grad)) for grad in grads]


def _norm(grads: list[Tensor], owners: list[_Owner], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Of all gradients: parts are added up over the ranks, what every rank has whole counts once."""
    groups: dict[str, Any] = {}
    parts: dict[str, list[Tensor]] = {}
    whole: list[Tensor] = []
    for grad, owner in zip(grads, owners, strict=True):
        if owner is None or not owner[1]:
            whole.append(grad)
        else:
            model, shard = owner
            groups[model.group_name] = model.group
            parts.setdefault(model.group_name, []).append(only_counted(grad, shard, model.rank))
    total = _powers(whole, norm_type)
    for name, group in sorted(groups.items()):
        over_ranks = _powers(parts[name], norm_type)
        op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        dist.all_reduce(over_ranks, op=op, group=group)
        total = torch.maximum(total, over_ranks) if math.isinf(norm_type) else total + over_ranks
    norm = total if math.isinf(norm_type) else total ** (1 / norm_type)
    norm = norm.to(grads[0].dtype)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients over all ranks is {norm.item()}, so it cannot be clipped; "
            "error_if_nonfinite=False scales by it all the same"
        )
    return norm


def _powers(grads: list[Tensor], norm_type: float) -> Tensor:
    """Sum of the elements' powers in f64, or their largest magnitude."""
    total = torch.zeros((), dtype=torch.float64)
    for grad in grads:
        if not grad.numel():
            continue
        norm = torch.linalg.vector_norm(grad.double() if grad.numel() < 1 << 20 else grad, norm_type).double()
        total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm**norm_type
    return total
