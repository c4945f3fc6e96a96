"""What would make a run slow or fail later, found before any rank starts: for each run, and for --check."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from numadist import _syscalls
from numadist.launch.place import Placement
from numadist.topology.cpuset import format_list
from numadist.topology.machine import Machine
from numadist.topology.sysfs import CPU, read_text

NUM_GROUPS = 4  # process groups of a usual job

# With these set, libgomp leaves the main thread, and all it starts, one CPU after `import torch`.
NARROWING_VARIABLES = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
BINDING_OFF = {"false", "FALSE", "0"}


@dataclass(frozen=True)
class Finding:
    """One line of --check. problem None: all is well; it names its remedy otherwise."""

    subject: str
    state: str
    problem: str | None = None


def preflight_warnings(
    machine: Machine, plan: Placement, environ: Mapping[str, str], root: str = "/"
) -> list[str]:
    """One sentence a problem, with its remedy; the run goes on."""
    findings = [
        numa_balancing(machine, root, _all_bound(plan)),
        shared_memory(len(plan.ranks), root),
        openmp_variables(environ),
    ]
    return [f.problem for f in findings if f.problem]


def check(machine: Machine, plan: Placement, environ: Mapping[str, str], root: str = "/") -> list[Finding]:
    """Everything numarun knows to look at on this machine, for a run placed so."""
    return [
        memory_policy(),
        memory_nodes(machine),
        numa_balancing(machine, root, _all_bound(plan)),
        shared_memory(len(plan.ranks), root),
        governor(machine, root),
        huge_pages(root),
        cpu_quota(machine),
        openmp_variables(environ),
    ]


def segment_bytes(num_ranks: int) -> int:
    """An upper bound of what our collectives map for one group: a part a rank, a channel a pair."""
    return num_ranks * (1 << 20) + num_ranks * num_ranks * (128 << 10)


def memory_policy() -> Finding:
    """Sets the policy this process has once more: nothing changes, and a refusal shows."""
    try:
        _syscalls.set_mempolicy(*_syscalls.get_mempolicy())
    except OSError as error:
        return Finding(
            "memory policy",
            "refused",
            f"{error.strerror} (container without CAP_SYS_NICE or a seccomp filter, or a kernel without NUMA); "
            "docker: --cap-add SYS_NICE",
        )
    return Finding("memory policy", "set_mempolicy and get_mempolicy are allowed")


def memory_nodes(machine: Machine) -> Finding:
    poor = [n for d in machine.domains for n in d.nodes if not machine.node(n).usable_memory]
    if poor and machine.has_numa:
        return Finding(
            "memory nodes",
            f"allowed {format_list(machine.allowed_mems)}",
            f"nodes {format_list(poor)} have CPUs here but no memory this process may use; their ranks take the "
            "nearest; widen cpuset.mems (docker: --cpuset-mems) if the memory exists",
        )
    return Finding("memory nodes", f"allowed {format_list(machine.allowed_mems)}")


def _all_bound(plan: Placement) -> bool:
    return all(r.mem_policy == "bind" for r in plan.ranks)


def numa_balancing(machine: Machine, root: str = "/", bound: bool = False) -> Finding:
    """bound: all ranks' memory is under a BIND policy, which since Linux 5.12 is balanced only on request."""
    value = read_text(Path(root) / "proc/sys/kernel/numa_balancing")
    if value in (None, "0"):
        return Finding("NUMA balancing", "off")
    if len(machine.nodes) < 2 or bound:
        return Finding("NUMA balancing", f"on, without effect on {'bound memory' if bound else 'one node'}")
    return Finding(
        "NUMA balancing",
        "on",
        f"kernel.numa_balancing={value} moves pages and adds latency spikes; 'sysctl kernel.numa_balancing=0'",
    )


def shared_memory(num_ranks: int, root: str = "/") -> Finding:
    try:
        status = os.statvfs(Path(root) / "dev/shm")
    except OSError:
        return Finding("/dev/shm", "not there; memfd will be used")
    free, need = status.f_bavail * status.f_frsize, NUM_GROUPS * segment_bytes(num_ranks)
    state = f"{free >> 20} MiB free"
    if free >= need:
        return Finding("/dev/shm", state)
    return Finding(
        "/dev/shm",
        state,
        f"/dev/shm has {state}, collectives ask for {need >> 20} MiB; docker: --shm-size=1g (memfd will be used)",
    )


def governor(machine: Machine, root: str = "/") -> Finding:
    path = f"{CPU}/cpu{machine.allowed_cpus[0]}/cpufreq/scaling_governor"
    name = read_text(Path(root) / path)
    if name in (None, "performance", "schedutil"):
        return Finding("CPU governor", name or "not shown (virtual machine or fixed frequency)")
    return Finding(
        "CPU governor", name, f"governor {name} ramps up late; 'cpupower frequency-set -g performance'"
    )


def huge_pages(root: str = "/") -> Finding:
    text = read_text(Path(root) / "sys/kernel/mm/transparent_hugepage/enabled")
    state = "not in this kernel" if text is None else text.partition("[")[2].partition("]")[0]
    if state != "never":
        return Finding("huge pages", state)
    remedy = "'echo madvise > /sys/kernel/mm/transparent_hugepage/enabled'"
    return Finding(
        "huge pages", state, f"transparent huge pages are off: weights cost more TLB misses; {remedy}"
    )


def cpu_quota(machine: Machine) -> Finding:
    quota, cores = machine.cpu_quota, len(machine.cores)
    if quota is None or quota >= cores:
        return Finding("CPU quota", "none" if quota is None else f"{quota:.1f} cores")
    return Finding(
        "CPU quota",
        f"{quota:.1f} cores",
        f"the cgroup grants {quota:.1f} cores' time on {cores} cores: threads will be throttled; docker: --cpus",
    )


def openmp_variables(environ: Mapping[str, str]) -> Finding:
    found = [name for name in NARROWING_VARIABLES if environ.get(name, "false") not in BINDING_OFF]
    if not found:
        return Finding("OpenMP variables", "none that pin threads")
    names = " and ".join(f"{name}={environ[name]}" for name in found)
    return Finding(
        "OpenMP variables",
        names,
        f"{names} in the environment: after import torch each rank may see one CPU; unset it, "
        "or use --omp-bind cores",
    )
