"""Fewer ranks than the group has: some lead, with the cores of the others, who only receive the result.

A leader's process gets the CPUs and threads of the ranks it leads, until another choice is made. The others' graph
holds no weights: it is the broadcast of every output.
"""

import functools
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from numadist import binding
from numadist.config import config
from numadist.errors import ShardError
from numadist.shard import graph
from numadist.shard.apply import drop_unused_parameters
from numadist.shard.graph import aten


@dataclass(frozen=True)
class Member:
    """What every rank knows of every other before they decide."""

    machine: str
    cpus: tuple[int, ...]
    threads: int


@functools.cache
def _own() -> Member:
    """This rank as it was before it ever led: leading changes its CPUs and threads."""
    machine = f"{platform.node()}/{config().machine}"
    return Member(machine, binding.current_binding().cpus, torch.get_num_threads())


def members(group: dist.ProcessGroup) -> list[Member]:
    """Of all ranks, in order. Collective."""
    found: list[Member | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _own(), group=group)
    return [m for m in found if m is not None]


def possible_counts(everybody: list[Member], gm: GraphModule) -> list[int]:
    """Numbers of ranks the group can use, all of them first: divisors, on one machine, at fixed sizes."""
    world = len(everybody)
    if len({m.machine for m in everybody}) > 1 or not all(_is_fixed(n) for n in _outputs(gm)):
        return [world]
    return [n for n in range(world, 0, -1) if world % n == 0]


@dataclass(frozen=True)
class Lead:
    """This rank's part: index among the leaders or None, and the group of the leaders if there are several."""

    index: int | None
    group: dist.ProcessGroup | None


def lead(everybody: list[Member], count: int, group: dist.ProcessGroup) -> Lead:
    """Take the lead, with the CPUs and threads of the ranks led, or step back. Collective over the leaders."""
    rank, step = dist.get_rank(group), len(everybody) // count
    led = everybody[rank : rank + (step if rank % step == 0 else 1)]
    binding.bind_cpus({cpu for m in led for cpu in m.cpus})
    torch.set_num_threads(sum(m.threads for m in led))
    if rank % step:
        return Lead(None, None)
    if count in (1, len(everybody)):
        return Lead(rank // step, group if count > 1 else None)
    ranks = [dist.get_global_rank(group, r) for r in range(0, len(everybody), step)]
    sub = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(sub, dist.ProcessGroup)
    return Lead(rank // step, sub)


def check_count(count: int, everybody: list[Member], gm: GraphModule) -> None:
    """Raises: ShardError if the group cannot use so many of its ranks."""
    possible = possible_counts(everybody, gm)
    if count not in possible:
        raise ShardError(
            f"asked for {count} of {len(everybody)} ranks; possible here: {possible} (divisors of the group's size, "
            "on one machine, with outputs of fixed size)"
        )


def share_outputs(gm: GraphModule, group_name: str, leads: bool) -> None:
    """Broadcast every output from rank 0; the graph of a rank that does not lead becomes nothing but that."""
    ops, output = torch.ops._c10d_functional, gm.graph.output_node()
    with gm.graph.inserting_before(output):
        for node in _outputs(gm):
            sent = gm.graph.call_function(aten.contiguous.default, (node,)) if leads else _room(gm, node)
            started = gm.graph.call_function(ops.broadcast.default, (sent, 0, group_name))
            output.replace_input_with(node, gm.graph.call_function(ops.wait_tensor.default, (started,)))
    gm.graph.eliminate_dead_code()
    drop_unused_parameters(gm)
    gm.recompile()


def _room(gm: GraphModule, node: Node) -> Node:
    val = graph.value(node)
    return gm.graph.call_function(aten.zeros.default, (list(val.shape),), {"dtype": val.dtype})


def _outputs(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.output_node().all_input_nodes if isinstance(graph.value(n), torch.Tensor)]


def _is_fixed(node: Node) -> bool:
    return all(graph.is_static(size) for size in graph.shape(node))
