"""`ranks="auto"`, `blocks="auto"`: how many ranks, and which blocks over them, by what the cost model predicts."""

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from numadist.costmodel.measure import kept_profile
from numadist.costmodel.price import block_costs, sharded_s
from numadist.costmodel.profile import MachineProfile
from numadist.costmodel.software import NUMADIST
from numadist.errors import NumadistError, ShardError
from numadist.shard.blocks import build_schema
from numadist.shard.leaders import Member
from numadist.shard.schema import BlockCost, Candidate, Costs, LeftAlone, Schema
from numadist.shard.work import work_of

# Predictions are not that exact: another plan than the one asked for must promise so much more.
MARGIN = 1.03


@dataclass(frozen=True)
class _Plan:
    schema: Schema
    seconds: float  # predicted
    costs: list[BlockCost]
    left_out: bool = False  # a variation on another plan of as many ranks, shown but never chosen

    def candidate(self, chosen: "_Plan") -> Candidate:
        """As it is shown, with the reason why it is not the chosen one."""
        reason = ""
        if self.left_out:
            idle = sum(not cost.sharded for cost in self.costs)
            reason = f"{idle} of its blocks do not pay"
        elif self is not chosen and self.seconds > chosen.seconds:
            reason = f"{self.seconds / chosen.seconds:.2f} times as long as the chosen plan"
        elif self is not chosen:
            reason = f"not {MARGIN - 1:.0%} faster than the chosen plan, which uses more ranks"
        return Candidate(self.schema.num_ranks, 1e3 * self.seconds, len(self.schema.blocks), reason)


def choose_schema(gm: GraphModule, counts: list[int], profile: MachineProfile, choose_blocks: bool) -> Schema:
    """The cheapest of the candidates.

    counts: numbers of ranks to consider, the preferred one first. 1: one rank with the cores of all ranks.
    choose_blocks: leave blocks whole that do not pay.
    """
    plans = [plan for count in counts for plan in _plans(gm, count, profile, choose_blocks)]
    best, *others = [plan for plan in plans if not plan.left_out]
    for plan in others:
        if plan.seconds * MARGIN < best.seconds:
            best = plan
    candidates = [plan.candidate(best) for plan in plans]
    return replace(best.schema, costs=Costs(profile.name, candidates, best.costs))


def _plans(gm: GraphModule, count: int, profile: MachineProfile, choose_blocks: bool) -> list[_Plan]:
    """Of so many ranks: every block sharded and, if some do not pay and may be chosen, those left whole."""
    schema = build_schema(gm, count)
    work = work_of(gm, schema)
    seconds = sharded_s(work, profile, NUMADIST)
    if count == 1:
        return [_Plan(schema, seconds, [])]
    costs = [
        BlockCost(b.module, b.kind, 1e3 * c.sharded_s, 1e3 * c.replicated_s, c.pays or not choose_blocks)
        for b, c in zip(schema.blocks, block_costs(work, profile, NUMADIST), strict=True)
    ]
    dropped = [(b, c) for b, c in zip(schema.blocks, costs, strict=True) if not c.sharded]
    if not dropped:
        return [_Plan(schema, seconds, costs)]
    left = [
        LeftAlone(b.module, b.sink or b.heads[0] if b.sink or b.heads else b.lookups[0], _reason(c))
        for b, c in dropped
    ]
    kept = [b for b, c in zip(schema.blocks, costs, strict=True) if c.sharded]
    cheaper = replace(schema, blocks=kept, left_alone=[*schema.left_alone, *left])
    cheaper_s = sharded_s(work_of(gm, cheaper), profile, NUMADIST)
    return [_Plan(schema, seconds, costs, left_out=True), _Plan(cheaper, cheaper_s, costs)]


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
