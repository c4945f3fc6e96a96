"""Tell a rank the kernel killed for memory from one somebody killed: memory is free again once it is dead."""

import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from numadist.topology.sysfs import NODE, node_memory, read_text

SAMPLE_EVERY_S = 1.0
NUM_SAMPLES = 3
# A node with more than this share free was not what ran out.
SCARCE = 0.1


class OomWatch:
    """Samples free memory of the nodes ranks are bound to, and the kernel's count of OOM kills."""

    def __init__(self, nodes: Iterable[int], root: str = "/") -> None:
        self._root = Path(root)
        self._free: dict[int, deque[int]] = {node: deque(maxlen=NUM_SAMPLES) for node in nodes}
        self._total: dict[int, int] = {}
        self._kills = self._count_kills()
        self.sample()

    def sample(self) -> None:
        for node, samples in self._free.items():
            self._total[node], free = node_memory(self._root / NODE / f"node{node}")
            samples.append(free)

    def explain(self, mem_nodes: Iterable[int]) -> str | None:
        """Why a rank with this memory was killed by SIGKILL; None when the kernel killed nothing for memory."""
        if self._count_kills() <= self._kills:
            return None
        lowest = {node: min(self._free[node]) for node in mem_nodes if node in self._free}
        scarce = [n for n, free in lowest.items() if free <= SCARCE * self._total[n]]
        if not scarce:
            return "kernel OOM: its nodes had memory left, so a container limit (memory.max) was reached"
        parts = [f"node {n} had {_gib(lowest[n])} of {_gib(self._total[n])} GiB free" for n in scarce]
        return f"kernel OOM: {', '.join(parts)} - use --mem preferred or fewer bytes per rank"

    def _count_kills(self) -> int:
        found = re.search(r"^oom_kill (\d+)", read_text(self._root / "proc/vmstat") or "", re.M)
        return int(found[1]) if found else 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f}"
