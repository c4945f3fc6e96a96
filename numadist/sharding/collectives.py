"""How collectives are written into a rank's graph."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.fx import Node

from numadist.graph.query import aten
from numadist.sharding.placement import Shard

Emit = Callable[[torch.fx.Graph, Node], Node]


@dataclass(frozen=True)
class Emitter:
    """How collectives are written into a graph, at the graph's insertion point."""

    all_reduce: Emit  # partial value -> its sum over the ranks
    all_gather: Emit  # [d0, ...] on each rank -> [num_ranks * d0, ...]
    # [num_ranks * d0, ...] partial -> [d0, ...]: this rank's part of the sum. None: no sequence parallelism here.
    reduce_scatter: Emit | None = None
    # Training only: a replicated value on its way into a block; its gradient is a sum over the ranks.
    enter: Emit | None = None
    # Training only: a rank's part of a weight, of which other ranks may hold the same elements.
    enter_weight: Callable[[torch.fx.Graph, Node, Shard], Node] | None = None
    # Training only: a bias that is added to a partial sum, so once.
    enter_bias: Emit | None = None
    # False: a vocabulary-split head gives each rank the logits of its own rows, for callers that need no others.
    gather_heads: bool = True


def emit_functional(group_name: str, num_ranks: int) -> Emitter:
    """torch's functional collectives: they work on every backend, and with a fake group in tests."""
    ops = torch.ops._c10d_functional

    def all_reduce(g: torch.fx.Graph, x: Node) -> Node:
        started = g.call_function(ops.all_reduce.default, (x, "sum", group_name))
        return g.call_function(ops.wait_tensor.default, (started,))

    def all_gather(g: torch.fx.Graph, x: Node) -> Node:
        dense = g.call_function(aten.contiguous.default, (x,))
        started = g.call_function(ops.all_gather_into_tensor.default, (dense, num_ranks, group_name))
        return g.call_function(ops.wait_tensor.default, (started,))

    def reduce_scatter(g: torch.fx.Graph, x: Node) -> Node:
        dense = g.call_function(aten.contiguous.default, (x,))
        started = g.call_function(ops.reduce_scatter_tensor.default, (dense, "sum", num_ranks, group_name))
        return g.call_function(ops.wait_tensor.default, (started,))

    return Emitter(all_reduce, all_gather, reduce_scatter)


def emit_numadist(group_name: str, num_ranks: int) -> Emitter:
    """Our own ops, for groups of backend "numa": three times cheaper in a compiled graph."""
    ops = torch.ops.numadist

    def all_reduce(g: torch.fx.Graph, x: Node) -> Node:
        dense = g.call_function(aten.contiguous.default, (x,))
        g.call_function(ops.all_reduce_.default, (dense, group_name))
        return dense

    def all_gather(g: torch.fx.Graph, x: Node) -> Node:
        return g.call_function(ops.all_gather.default, (x, num_ranks, group_name))

    def reduce_scatter(g: torch.fx.Graph, x: Node) -> Node:
        return g.call_function(ops.reduce_scatter.default, (x, num_ranks, group_name))

    return Emitter(all_reduce, all_gather, reduce_scatter)


def emitter_of(group: dist.ProcessGroup) -> Emitter:
    """What fits the group's backend."""
    emit = emit_numadist if dist.get_backend(group) == "numa" else emit_functional
    return emit(group.group_name, dist.get_world_size(group))
