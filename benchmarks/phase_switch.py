"""What does a switch between prefill and decode cost, and does it make threads?

    numarun --nproc-per-node 1 [--preload iomp5 --env KMP_HOT_TEAMS_MODE=1] benchmarks/phase_switch.py [SMALL LARGE ...]

A switch sets the thread count and forms the new team. 1,000 switches for each pair of thread counts.
"""

import os
import statistics
import sys
import time

import torch

from numadist.phases.phase import phase, phase_stats, switch_phase, use_plan
from numadist.phases.plan import PhasePlan, PlanPair, RankPlan

SWITCHES = 1000


def measure(small: int, large: int) -> str:
    cpus = tuple(range(large))
    use_plan(PlanPair(PhasePlan((RankPlan(cpus, large),)), PhasePlan((RankPlan(cpus, small),))))
    took: dict[str, list[float]] = {"decode": [], "prefill": []}
    with phase("prefill"):
        created, ids = phase_stats().threads_created, set(os.listdir("/proc/self/task"))
        for _ in range(SWITCHES // 2):
            for name, times in took.items():
                begin = time.perf_counter()
                switch_phase(name)
                times.append((time.perf_counter() - begin) * 1e6)
        created = phase_stats().threads_created - created
        changed = len(ids ^ set(os.listdir("/proc/self/task")))
    shrink, grow = (statistics.median(times) for times in took.values())
    both = statistics.median([*took["decode"], *took["prefill"]])
    return (
        f"{large} -> {small}: {shrink:.1f} us  {small} -> {large}: {grow:.1f} us  median {both:.1f} us  "
        + (f"threads created {created}, ids changed {changed}")
    )


def main() -> None:
    counts = list(map(int, sys.argv[1:])) or [1, 2, 2, 4]
    print(f"{phase_stats().runtime or 'no OpenMP'}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    for small, large in zip(counts[::2], counts[1::2], strict=True):
        print(measure(small, large), flush=True)


if __name__ == "__main__":
    main()
