"""What would make a run slow or fail later, found before any rank starts."""

import os
from pathlib import Path

from numadist.launch.place import Plan
from numadist.topology.machine import Machine
from numadist.topology.sysfs import read_text

# What our collectives map for one rank of one group, rounded up, and the groups of a usual job.
SEGMENT_BYTES = 1 << 20
NUM_GROUPS = 4


def preflight_warnings(machine: Machine, plan: Plan, root: str = "/") -> list[str]:
    """One sentence a problem, with its remedy; the run goes on."""
    return [text for text in (_numa_balancing(machine, plan, root), _small_shm(plan, root)) if text]


def _numa_balancing(machine: Machine, plan: Plan, root: str) -> str | None:
    value = read_text(Path(root) / "proc/sys/kernel/numa_balancing")
    # Since Linux 5.12 memory under a BIND policy is balanced only on request.
    unbound = any(r.mem_policy != "bind" for r in plan.ranks)
    if value in (None, "0") or len(machine.nodes) < 2 or not unbound:
        return None
    return (
        f"kernel.numa_balancing={value} moves pages and adds latency spikes; 'sysctl kernel.numa_balancing=0'"
    )


def _small_shm(plan: Plan, root: str) -> str | None:
    try:
        status = os.statvfs(Path(root) / "dev/shm")
    except OSError:
        return None
    free, need = status.f_bavail * status.f_frsize, len(plan.ranks) * NUM_GROUPS * SEGMENT_BYTES
    if free >= need:
        return None
    return (
        f"/dev/shm has {free >> 20} MiB free, collectives ask for {need >> 20} MiB; "
        "docker: --shm-size=1g (memfd will be used)"
    )
