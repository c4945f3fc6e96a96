"""Backward of sharded blocks: every collective of the forward has its dual.

| forward | backward |
|---|---|
| sum over ranks, where a partial value leaves a block | identity: every rank has the whole gradient |
| identity, where a replicated value enters a block | sum over ranks: each rank saw the part of its own shard |
| gather of the head's logits | this rank's part: every rank computes the same loss |
| identity of a weight of which ranks hold the same elements | sum over the ranks that hold an element |
| a bias of a partial sum, which only rank 0 adds | identity: every rank has the whole gradient |

Source of the first three: Megatron-LM (arXiv 1909.08053), operators f and g.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from numadist.sharding.collectives import Emitter
from numadist.sharding.placement import Cut, Shard, indices_of, overlaps

_ops: Any = torch.ops._c10d_functional


def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    total: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group_name))
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        return _all_reduce(x, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group_name), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, num_ranks: int, group_name: str) -> Tensor:
        ctx.rank, ctx.rows = rank, x.shape[0]
        gathered: Tensor = _ops.wait_tensor(
            _ops.all_gather_into_tensor(x.contiguous(), num_ranks, group_name)
        )
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(0, ctx.rank * ctx.rows, ctx.rows), None, None, None


class _HeldInCommon(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, dim: int, size: int, cut: Cut, group_name: str) -> Tensor:
        ctx.where = dim, size, cut, group_name
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        dim, size, cut, group_name = ctx.where
        own = torch.tensor(indices_of(cut), dtype=torch.int64)
        whole = grad.new_zeros((*grad.shape[:dim], size, *grad.shape[dim + 1 :]))
        whole.index_copy_(dim, own, grad)
        return _all_reduce(whole, group_name).index_select(dim, own), None, None, None, None


class _OnRank0(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, b: Tensor, rank: int) -> Tensor:
        return b.view_as(b) if rank == 0 else torch.zeros_like(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_over_ranks(x: Tensor, group_name: str) -> Tensor:
    y: Tensor = _Sum.apply(x, group_name)  # type: ignore[no-untyped-call]  # torch's own
    return y


def enter_block(x: Tensor, group_name: str) -> Tensor:
    y: Tensor = _Enter.apply(x, group_name)  # type: ignore[no-untyped-call]  # torch's own
    return y


def gather_over_ranks(x: Tensor, rank: int, num_ranks: int, group_name: str) -> Tensor:
    y: Tensor = _Gather.apply(x, rank, num_ranks, group_name)  # type: ignore[no-untyped-call]  # torch's own
    return y


def held_in_common(w: Tensor, dim: int, size: int, cut: Cut, group_name: str) -> Tensor:
    y: Tensor = _HeldInCommon.apply(w, dim, size, cut, group_name)  # type: ignore[no-untyped-call]  # torch's own
    return y


def on_rank_0(b: Tensor, rank: int) -> Tensor:
    y: Tensor = _OnRank0.apply(b, rank)  # type: ignore[no-untyped-call]  # torch's own
    return y


def emit_trainable(group_name: str, rank: int, num_ranks: int) -> Emitter:
    """Collectives that autograd can walk back through, on any backend."""

    def all_reduce(g: Graph, x: Node) -> Node:
        return g.call_function(sum_over_ranks, (x, group_name))

    def all_gather(g: Graph, x: Node) -> Node:
        return g.call_function(gather_over_ranks, (x, rank, num_ranks, group_name))

    def enter(g: Graph, x: Node) -> Node:
        return g.call_function(enter_block, (x, group_name))

    def enter_weight(g: Graph, w: Node, shard: Shard) -> Node:
        for dim, cuts in shard.dims.items():
            if overlaps(cuts.cuts):
                w = g.call_function(held_in_common, (w, dim, cuts.size, cuts.cuts[rank], group_name))
        return w

    def enter_bias(g: Graph, b: Node) -> Node:
        return g.call_function(on_rank_0, (b, rank))

    return Emitter(all_reduce, all_gather, enter=enter, enter_weight=enter_weight, enter_bias=enter_bias)
