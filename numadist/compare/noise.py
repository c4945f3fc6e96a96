"""What else the machine did while a round ran: a number taken on a busy machine says so."""

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU seconds of the whole machine since boot."""

    busy_s: float
    steal_s: float


@dataclass(frozen=True)
class Noise:
    """Of one round: cores kept busy by others than the measured processes, and the share stolen by a hypervisor."""

    foreign_cores: float
    steal: float


def usage() -> Usage:
    fields = [int(f) for f in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return Usage((user + nice + system + irq + softirq) / _CLOCK_TICKS, steal / _CLOCK_TICKS)


def process_cpu_s(pids: list[int]) -> float:
    """CPU seconds the processes and the children they have reaped took so far."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        total += sum(int(f) for f in fields[11:15])
    return total / _CLOCK_TICKS


def between(before: Usage, after: Usage, own_s: float, wall_s: float, num_cpus: int) -> Noise:
    """own_s: CPU seconds the measured processes took in the round."""
    foreign_s = max(0.0, after.busy_s - before.busy_s - own_s)
    return Noise(foreign_s / wall_s, (after.steal_s - before.steal_s) / (wall_s * num_cpus))
