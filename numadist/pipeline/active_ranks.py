"""Fewer ranks compute than the group has, with the cores of the others, who only receive the result.

An active rank's process gets the CPUs and threads of the ranks behind it, until another choice is made. The others'
graph holds no weights: it is the broadcast of every output.
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
from numadist.graph import query
from numadist.graph.capture import CapturedModel
from numadist.graph.cleanup import drop_unused_parameters
from numadist.graph.query import aten
from numadist.pipeline.stages import Site
from numadist.sharding.auto import divisors
from numadist.sharding.collectives import emitter_of
from numadist.sharding.schema import Schema


@dataclass(frozen=True)
class Member:
    """What every rank knows of every other before they decide."""

    machine: str
    cpus: tuple[int, ...]
    threads: int


@functools.cache
def _own() -> Member:
    """This rank as it was before it ever computed for others, which changes its CPUs and threads."""
    machine = f"{platform.node()}/{config().machine}"
    return Member(machine, binding.current_binding().cpus, torch.get_num_threads())


def members(group: dist.ProcessGroup) -> list[Member]:
    """Of all ranks, in order. Collective."""
    found: list[Member | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _own(), group=group)
    return [m for m in found if m is not None]


def possible_counts(everybody: list[Member], gm: GraphModule) -> list[int]:
    """Numbers of ranks the group can use, all of them first: divisors, on one machine, at fixed sizes."""
    if len({m.machine for m in everybody}) > 1 or not all(_is_fixed(n) for n in _outputs(gm)):
        return [len(everybody)]
    return divisors(len(everybody))


def check_count(count: int, num_ranks: int, possible: list[int]) -> None:
    """Raises: ShardError if a group cannot use so many of its ranks."""
    if count not in possible:
        raise ShardError(
            f"asked for {count} of {num_ranks} ranks; possible here: {possible} (divisors of the group's size, "
            "on one machine, with outputs of fixed size)"
        )


def active_site(
    captured: CapturedModel, schema: Schema, everybody: list[Member], group: dist.ProcessGroup
) -> Site:
    """How this rank takes part where only schema.num_ranks of the group compute. Collective.

    Raises: ShardError if the group cannot use so many of its ranks.
    """
    check_count(schema.num_ranks, len(everybody), possible_counts(everybody, captured.gm))
    index, active_group = _take_part(everybody, schema.num_ranks, group)
    return Site(
        index or 0,
        None if index is None or active_group is None else emitter_of(active_group),
        finish=lambda gm: share_outputs(gm, group.group_name, is_active=index is not None),
    )


def _take_part(
    everybody: list[Member], count: int, group: dist.ProcessGroup
) -> tuple[int | None, dist.ProcessGroup | None]:
    """Take over the CPUs and threads of the ranks behind this one, or step back.

    Returns this rank's index among the active ones, or None, and their group if they are several. Collective over
    the active ranks.
    """
    rank, step = dist.get_rank(group), len(everybody) // count
    own = everybody[rank : rank + (step if rank % step == 0 else 1)]
    binding.bind_cpus({cpu for m in own for cpu in m.cpus})
    torch.set_num_threads(sum(m.threads for m in own))
    if rank % step:
        return None, None
    if count in (1, len(everybody)):
        return rank // step, group if count > 1 else None
    ranks = [dist.get_global_rank(group, r) for r in range(0, len(everybody), step)]
    active = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(active, dist.ProcessGroup)
    return rank // step, active


def share_outputs(gm: GraphModule, group_name: str, is_active: bool) -> None:
    """Broadcast every output from rank 0; the graph of a rank that does not compute becomes nothing but that."""
    ops, output = torch.ops._c10d_functional, gm.graph.output_node()
    with gm.graph.inserting_before(output):
        for node in _outputs(gm):
            sent = gm.graph.call_function(aten.contiguous.default, (node,)) if is_active else _room(gm, node)
            started = gm.graph.call_function(ops.broadcast.default, (sent, 0, group_name))
            output.replace_input_with(node, gm.graph.call_function(ops.wait_tensor.default, (started,)))
    gm.graph.eliminate_dead_code()
    drop_unused_parameters(gm)
    gm.recompile()


def _room(gm: GraphModule, node: Node) -> Node:
    val = query.value(node)
    return gm.graph.call_function(aten.zeros.default, (list(val.shape),), {"dtype": val.dtype})


def _outputs(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.output_node().all_input_nodes if isinstance(query.value(n), torch.Tensor)]


def _is_fixed(node: Node) -> bool:
    return all(query.is_static(size) for size in query.shape(node))
