"""What numarun says, all on stderr: placement before the run, warnings, the summary of a failure."""

import json
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from numadist.launch.output import Stream
from numadist.launch.place import Placement, RankPlacement
from numadist.topology.cpuset import format_list
from numadist.topology.machine import Machine
from numadist.topology.render import gib, plural, short_list, summary

MAX_TRACEBACK_LINES = 3


@dataclass(frozen=True)
class Failure:
    """The rank that ended first with something else than success. status: exit code, or minus a signal."""

    rank: int
    placement: RankPlacement
    pid: int
    status: int
    seconds: float
    error_file: str
    stderr: Stream | None
    oom: str | None = None  # the kernel killed it for memory, and what was left

    @property
    def exit_code(self) -> int:
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def how(self) -> str:
        if self.status >= 0:
            return f"exit code {self.status}"
        how = f"killed by signal {-self.status} ({_signal_name(-self.status)})"
        return f"{how}; {self.oom}" if self.oom else how


def say(text: str) -> None:
    """One line to stderr; a terminal that is gone must not hide the exit code."""
    try:
        print(f"numarun: {text}", file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None


def warn(text: str) -> None:
    say(f"warning: {text}")


def environment_line(number: int, environment: Mapping[str, str], inherited: Mapping[str, str]) -> str:
    """What numarun sets for a rank, apart from what it passes on."""
    changed = {name: value for name, value in environment.items() if inherited.get(name) != value}
    return f"r{number} environment {' '.join(f'{name}={shlex.quote(changed[name])}' for name in sorted(changed))}"


def plan_lines(machine: Machine, plan: Placement, how: str) -> list[str]:
    """The machine, then one line a rank. how: e.g. `1 per NUMA node`."""
    lines = [f"{summary(machine)}; {plural(len(plan.ranks), 'rank')}, {how}"]
    for r in plan.ranks:
        nodes = f"node {format_list(r.numa_nodes)}" if r.numa_nodes else "no node"
        lines.append(
            f"r{r.rank} socket {r.package} {nodes} cpus {short_list(r.cpus)} "
            f"({plural(num_cores(machine, r), 'core')}) mem {memory_text(r)} "
            f"{_memory_size(machine, r)} threads {r.threads}"
        )
    return lines


def num_cores(machine: Machine, placement: RankPlacement) -> int:
    return sum(1 for core in machine.cores if set(core.cpus) & set(placement.cpus))


def memory_text(placement: RankPlacement) -> str:
    if placement.mem_policy in ("none", "local"):
        return placement.mem_policy
    return f"{placement.mem_policy}:{format_list(placement.mem_nodes)}"


def _memory_size(machine: Machine, placement: RankPlacement) -> str:
    nodes = [n for n in machine.nodes if n.id in placement.mem_nodes]
    return f"{gib(sum(n.memory_bytes for n in nodes))} free {gib(sum(n.free_bytes for n in nodes))}"


def failure_summary(failure: Failure, stopped: Mapping[int, signal.Signals], log_dir: str | None) -> None:
    """Six lines, eight at most: which rank and how, why, where it ran, who was stopped, logs, exit code."""
    p = failure.placement
    nodes = f"node {format_list(p.numa_nodes)}" if p.numa_nodes else "no node"
    say(f"rank {failure.rank} ({nodes}, pid {failure.pid}) failed first: {failure.how}")
    for line in _why(failure):
        say(f"  {line}")
    say(
        f"  it ran {failure.seconds:.1f} s on cpus {short_list(p.cpus)}, "
        f"mem {memory_text(p)}, {plural(p.threads, 'thread')}"
    )
    say(_stopped_text(stopped))
    say(
        f"logs: {log_dir}/r{failure.rank}.out and .err"
        if log_dir
        else "no logs kept; use --log-dir DIR to keep them"
    )
    say(f"exit code {failure.exit_code}")


def _stopped_text(stopped: Mapping[int, signal.Signals]) -> str:
    if not stopped:
        return "no other rank was running"
    parts = []
    for number in sorted(set(stopped.values()), key=int, reverse=True):  # SIGTERM before SIGKILL
        ranks = [rank for rank, sent in stopped.items() if sent == number]
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {format_list(ranks)} ({number.name})")
    return f"stopped {', '.join(parts)}"


def _why(failure: Failure) -> Iterable[str]:
    """The best explanation known: what `@record` wrote, the signal's usual cause, the last line of stderr."""
    recorded = _recorded(failure.error_file)
    if recorded:
        return recorded
    if failure.oom is None and -failure.status in USUAL_CAUSE:
        return [USUAL_CAUSE[-failure.status]]
    if failure.stderr is not None and failure.stderr.last_line:
        return [f"its last line on stderr: {failure.stderr.last_line[:200]}"]
    return ["it wrote nothing on stderr that numarun saw; torch's @record would save the exception"]


USUAL_CAUSE: dict[int, str] = {
    signal.SIGKILL: "SIGKILL comes from outside: kill -9, the out-of-memory killer, a container limit",
    signal.SIGBUS: "SIGBUS is most often a full /dev/shm (docker: --shm-size) or a mapped file cut short",
    signal.SIGSEGV: "SIGSEGV: run with --env PYTHONFAULTHANDLER=1 to see the Python stack",
    signal.SIGILL: "SIGILL: a library was built for another CPU",
}


def _recorded(path: str) -> list[str]:
    """The last lines of the exception torch's @record wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            message = json.load(file)["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    lines = [line for line in str(extra.get("py_callstack") or text).splitlines() if line.strip()]
    return lines[-MAX_TRACEBACK_LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
