"""Which plans are tried, and which one is taken: pure functions of the machine and of measured times."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from numadist.phases.plan import PhasePlan, PlanPair, RankPlan
from numadist.topology.machine import Machine
from numadist.topology.tree import TopoTree, breadth_first

# A step that gains less is none; two of them in a row end a search.
GAIN = 0.05
# Fewer threads that cost no more than this are better: the cores are free for others.
SLACK = 0.03
RANKS_PER_NODE = (1, 2)


def rank_choices(machine: Machine, tree: TopoTree, num_heads: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """CPUs of every rank, in thread order: whole NUMA nodes, then parts of them; as long as every rank has a head."""
    order = {cpu: i for i, cpu in enumerate(breadth_first(tree.root))}
    for per_node in RANKS_PER_NODE:
        ranks = []
        for domain in machine.domains:
            size, rest = divmod(len(domain.cores), per_node)
            starts = [i * size + min(i, rest) for i in range(per_node + 1)]
            ranks += [domain.cores[a:b] for a, b in pairwise(starts)]
        if all(ranks) and len(ranks) <= num_heads:
            yield tuple(tuple(sorted((c.cpus[0] for c in cores), key=order.__getitem__)) for cores in ranks)


def thread_steps(num_cores: int, num_domains: int) -> list[int]:
    """Thread counts to try: all cores, then one less in every cache domain, down to one a domain."""
    return list(range(num_cores, 0, -num_domains))


def walk(steps: list[int], cost_of: Callable[[int], float | None]) -> dict[int, float]:
    """Costs along the steps until two in a row gain less than 5 % on the best so far, or cost_of says None."""
    costs: dict[int, float] = {}
    best, idle = math.inf, 0
    for step in steps:
        cost = cost_of(step)
        if cost is None:
            break
        costs[step] = cost
        idle = 0 if cost < best * (1 - GAIN) else idle + 1
        best = min(best, cost)
        if idle == 2:
            break
    return costs


def smallest_good(costs: dict[int, float], slack: float = SLACK) -> int:
    """The smallest thread count that is within `slack` of the cheapest."""
    limit = min(costs.values()) * (1 + slack)
    return min(n for n, cost in costs.items() if cost <= limit)


def pair_of(ranks: tuple[tuple[int, ...], ...], decode_threads: int | None = None) -> PlanPair:
    """All cores for prefill; for decode so many threads a rank, or all its cores."""
    prefill = PhasePlan(tuple(RankPlan(cpus, len(cpus)) for cpus in ranks))
    decode = PhasePlan(tuple(RankPlan(cpus, min(len(cpus), decode_threads or len(cpus))) for cpus in ranks))
    return PlanPair(prefill, decode)


def score(times: dict[str, float]) -> float:
    """One number of several times: their geometric mean, so that each counts by its ratios."""
    return math.exp(sum(map(math.log, times.values())) / len(times))
