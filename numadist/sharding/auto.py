"""`ranks="auto"`, `blocks="auto"`: how many ranks, and which blocks over them, by what the cost model predicts."""

from dataclasses import dataclass, replace

from numadist.costmodel.price import block_costs, sharded_s
from numadist.costmodel.profile import MachineProfile
from numadist.costmodel.software import NUMADIST
from numadist.graph.capture import CapturedModel
from numadist.sharding.build_schema import build_schema
from numadist.sharding.count_work import work_of
from numadist.sharding.schema import BlockCost, Candidate, CodedWeights, Costs, LeftAlone, Schema

# Predictions are not that exact: another plan than the one asked for must promise so much more.
MARGIN = 1.03


@dataclass(frozen=True)
class _Option:
    schema: Schema
    seconds: float  # predicted
    costs: list[BlockCost]
    left_out: bool = False  # a variation on another plan of as many ranks, shown but never chosen

    def candidate(self, chosen: "_Option") -> Candidate:
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


def divisors(num_ranks: int) -> list[int]:
    """How many of the ranks may compute, all of them first: each then has the cores of equally many."""
    return [n for n in range(num_ranks, 0, -1) if num_ranks % n == 0]


def choose_schema(
    captured: CapturedModel,
    counts: list[int],
    profile: MachineProfile,
    choose_blocks: bool,
    codes: dict[str, CodedWeights] | None = None,
) -> Schema:
    """The cheapest of the candidates.

    counts: numbers of ranks to consider, the preferred one first. 1: one rank with the cores of all ranks.
    choose_blocks: leave blocks whole that do not pay. codes: what parameters become that are no plain numbers.
    """
    options = []
    for count in counts:
        schema = replace(build_schema(captured, count), codes=codes or {})
        options += _options(captured, schema, profile, choose_blocks)
    best, *others = [option for option in options if not option.left_out]
    for option in others:
        if option.seconds * MARGIN < best.seconds:
            best = option
    candidates = [option.candidate(best) for option in options]
    return replace(best.schema, costs=Costs(profile.name, candidates, best.costs))


def _options(
    captured: CapturedModel, schema: Schema, profile: MachineProfile, choose_blocks: bool
) -> list[_Option]:
    """Every block of the schema sharded and, if some do not pay and may be chosen, those left whole."""
    work = work_of(captured.gm, schema)
    seconds = sharded_s(work, profile, NUMADIST)
    if schema.num_ranks == 1:
        return [_Option(schema, seconds, [])]
    costs = [
        BlockCost(b.module, b.kind, 1e3 * c.sharded_s, 1e3 * c.replicated_s, c.pays or not choose_blocks)
        for b, c in zip(schema.blocks, block_costs(work, profile, NUMADIST), strict=True)
    ]
    dropped = [(b, c) for b, c in zip(schema.blocks, costs, strict=True) if not c.sharded]
    if not dropped:
        return [_Option(schema, seconds, costs)]
    left = [
        LeftAlone(b.module, b.sink or b.heads[0] if b.sink or b.heads else b.lookups[0], _reason(c))
        for b, c in dropped
    ]
    kept = [b for b, c in zip(schema.blocks, costs, strict=True) if c.sharded]
    cheaper = replace(schema, blocks=kept, left_alone=[*schema.left_alone, *left])
    cheaper_s = sharded_s(work_of(captured.gm, cheaper), profile, NUMADIST)
    return [_Option(schema, seconds, costs, left_out=True), _Option(cheaper, cheaper_s, costs)]


def _reason(cost: BlockCost) -> str:
    return f"sharding does not pay: predicted {cost.sharded_ms:.2f} ms split, {cost.whole_ms:.2f} ms whole"
