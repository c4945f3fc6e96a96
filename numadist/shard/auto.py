"""`ranks="auto"`, `blocks="auto"`: how many ranks, and which blocks over them, by what the cost model predicts."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from numadist.costmodel.measure import kept_profile
from numadist.costmodel.price import block_costs, process_s, sharded_s
from numadist.costmodel.profile import MachineProfile
from numadist.costmodel.software import NUMADIST
from numadist.errors import NumadistError, ShardError
from numadist.shard.blocks import build_schema
from numadist.shard.leaders import Member
from numadist.shard.schema import BlockCost, Candidate, Costs, LeftAlone, Schema
from numadist.shard.work import work_of

# Predictions are not that exact: another plan than the one asked for must promise so much more.
MARGIN = 1.03


def choose_schema(gm: GraphModule, counts: list[int], profile: MachineProfile, choose_blocks: bool) -> Schema:
    """The cheapest of the candidates.

    counts: numbers of ranks to consider, the preferred one first. 1: one rank with the cores of all ranks.
    choose_blocks: leave blocks whole that do not pay.
    """
    plans = [_plan(gm, count, profile, choose_blocks) for count in counts]
    best, best_s, costs = plans[0]
    for schema, seconds, blocks in plans[1:]:
        if seconds * MARGIN < best_s:
            best, best_s, costs = schema, seconds, blocks
    candidates = [Candidate(s.num_ranks, 1e3 * seconds, len(s.blocks)) for s, seconds, _ in plans]
    return replace(best, costs=Costs(profile.name, candidates, costs))


def _plan(
    gm: GraphModule, count: int, profile: MachineProfile, choose_blocks: bool
) -> tuple[Schema, float, list[BlockCost]]:
    """(schema, predicted seconds, what its blocks cost)."""
    schema = build_schema(gm, count)
    work = work_of(gm, schema)
    if count == 1:
        return schema, process_s(work, profile, NUMADIST), []
    costs = [
        BlockCost(b.module, b.kind, 1e3 * c.sharded_s, 1e3 * c.replicated_s, c.pays or not choose_blocks)
        for b, c in zip(schema.blocks, block_costs(work, profile, NUMADIST), strict=True)
    ]
    kept = [b for b, c in zip(schema.blocks, costs, strict=True) if c.sharded]
    dropped = [(b, c) for b, c in zip(schema.blocks, costs, strict=True) if not c.sharded]
    if dropped:
        left = [
            LeftAlone(b.module, b.sink or b.heads[0] if b.sink or b.heads else b.lookups[0], _reason(c))
            for b, c in dropped
        ]
        schema = replace(schema, blocks=kept, left_alone=[*schema.left_alone, *left])
        work = work_of(gm, schema)
    return schema, sharded_s(work, profile, NUMADIST), costs


def _reason(cost: BlockCost) -> str:
    return f"sharding does not pay: predicted {cost.sharded_ms:.2f} ms split, {cost.whole_ms:.2f} ms whole"


def shared_profile(
    given: MachineProfile | None, everybody: list[Member], group: dist.ProcessGroup
) -> MachineProfile:
    """Rank 0's profile, cut to the cores the ranks have, the same on every rank. Collective.

    Raises: ShardError on every rank if rank 0 has none.
    """
    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            box = [(given or kept_profile()).to_json()]
        except NumadistError as error:
            box = [error]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(box[0], NumadistError):
        raise ShardError(str(box[0]))
    profile = MachineProfile.from_json(box[0])
    cores = max(1, sum(m.threads for m in everybody) // profile.nodes)
    return replace(profile, cores_per_node=min(cores, profile.cores_per_node))
