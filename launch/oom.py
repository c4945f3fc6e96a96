"""Tell a rank the kernel killed for memory from one somebody killed: memory is free again once it is dead."""

import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from numadist.topology.sysfs import NODE, node_memory, read_text

# A rank can fill a node in a second, so a sample may be older than the shortage: it is an upper bound then.
SAMPLE_EVERY_S = 0.5
NUM_SAMPLES = 4
SCARCE = 0.1  # share of a node below which a sample shows the shortage itself


class OomWatch:
    """Samples free memory of the nodes ranks are bound to, and counts the kernel's OOM kills."""

    def __init__(self, nodes: Iterable[int], root: str = "/") -> None:
        self._root = Path(root)
        self._free: dict[int, deque[int]] = {node: deque(maxlen=NUM_SAMPLES) for node in nodes}
        self._total: dict[int, int] = {}
        self._kills, self._limits = self._count_kills(), self._count_limits()
        self.sample()

    def sample(self) -> None:
        for node, samples in self._free.items():
            self._total[node], free = node_memory(self._root / NODE / f"node{node}")
            samples.append(free)

    def explain(self, mem_nodes: Iterable[int]) -> str | None:
        """Why a rank with this memory was killed by SIGKILL; None when the kernel killed nothing for memory."""
        if self._count_kills() <= self._kills:
            return None
        if self._count_limits() > self._limits:
            return "kernel OOM: the memory limit of this cgroup was reached (memory.max)"
        lowest = {node: min(self._free[node]) for node in mem_nodes if node in self._free}
        if not lowest:
            return "kernel OOM: the machine ran out of memory"
        node = min(lowest, key=lambda n: lowest[n] / max(1, self._total[n]))
        bound = "" if lowest[node] <= SCARCE * self._total[node] else "less than "
        return (
            f"kernel OOM: node {node} had {bound}{_gib(lowest[node])} of {_gib(self._total[node])} GiB free - "
            "use --mem preferred or fewer bytes per rank"
        )

    def _count_kills(self) -> int:
        return _counter(self._root / "proc/vmstat", "oom_kill")

    def _count_limits(self) -> int:
        """How often a limit of this process's cgroup (v2) was the cause; `oom_kill` there counts others too."""
        found = re.search(r"^0::/(.*)$", read_text(self._root / "proc/self/cgroup") or "", re.M)
        return _counter(self._root / "sys/fs/cgroup" / found[1] / "memory.events", "oom") if found else 0


def _counter(path: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", read_text(path) or "", re.M)
    return int(found[1]) if found else 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f}"
