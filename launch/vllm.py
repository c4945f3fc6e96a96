"""`numadist vllm ...`: vLLM as it is, its workers placed as numarun places ranks, its collectives ours.

vLLM starts its workers itself, each in a process of its own, and binds their threads and their memory by a variable; we
set it from the topology, then ask the kernel what became of it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from numadist.errors import NumadistError
from numadist.launch.place import Placement, Request, place
from numadist.launch.report import plan_lines, say, warn
from numadist.launch.spawn import EXIT_NOT_FOUND
from numadist.topology.cpuset import format_list, parse_list
from numadist.topology.render import plural
from numadist.topology.sysfs import read_machine

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
USAGE = """usage: numadist vllm serve MODEL -tp 2 ...
       numadist vllm --workers N script.py ...
       numadist vllm --workers N -m package.module ...

Starts vLLM with its workers placed on NUMA nodes and its collectives in shared memory, and says what the kernel
did. The words are vLLM's own; --workers is for scripts, whose number of workers does not stand in their words."""
# vLLM's options whose product is the number of its workers.
SIZES = (
    ("-tp", "--tensor-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-dp", "--data-parallel-size"),
)
LOOK_S = 1.0  # between two looks at the workers
STEADY_LOOKS = 3  # weights are loaded once their memory grows no more


def main(argv: Sequence[str]) -> int:
    """The words are vLLM's own; returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    words, count = list(argv), 0
    if words[0] == "--workers":
        if len(words) < 3 or not words[1].isdecimal() or int(words[1]) < 1:
            raise NumadistError("--workers wants a number of at least 1 and what to run after it")
        count, words = int(words[1]), words[2:]
    command = command_of(words)
    if command is None:
        say("error: no vllm here; install vllm-cpu into the environment that has numadist")
        return EXIT_NOT_FOUND
    environment = {"NUMADIST_BACKEND": "numa", **os.environ}
    plan = None
    if BINDING in environment:
        say(f"note: {BINDING} is set, so workers go where it says")
    else:
        machine = read_machine()
        count = count or num_workers(words)
        plan = place(machine, Request(per="node", count=count))
        for line in plan_lines(machine, plan, f"{plural(count, 'worker')} of vLLM"):
            say(line)
        for text in plan.warnings:
            warn(text)
        environment[BINDING] = "|".join(format_list(rank.cpus) for rank in plan.ranks)
    return _run(command, environment, plan)


def command_of(words: Sequence[str]) -> list[str] | None:
    """What to execute for the words; None without vLLM."""
    if words[0] == "-m" or words[0].endswith(".py"):
        return [sys.executable, *words]
    packages = [name for name in ("vllm", "vllm-cpu") if _is_installed(name)]
    if packages == ["vllm-cpu"] and words[0] == "serve" and len(words) > 1:
        # The program of vllm-cpu 0.32 ends at once: it looks for a package named vllm. The server's module does not.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *words[1:]]
    program = shutil.which("vllm")
    return None if program is None else [program, *words]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def num_workers(words: Sequence[str]) -> int:
    """How many workers vLLM will start for its words. Raises: NumadistError."""
    total = 1
    for names in SIZES:
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") not in names:
                continue
            value = value if equals else (words[i + 1] if i + 1 < len(words) else "")
            if not value.isdecimal() or int(value) < 1:
                raise NumadistError(f"{word}: vLLM wants a number of at least 1 here, got {value!r}")
            total *= int(value)
            break
    return total


def _run(command: Sequence[str], environment: dict[str, str], plan: Placement | None) -> int:
    child = subprocess.Popen(command, env=environment)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: child.send_signal(got))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to vLLM too
    if plan is not None:
        _report_when_loaded(child, plan)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _report_when_loaded(child: "subprocess.Popen[Any]", plan: Placement) -> None:
    """Once the workers have loaded: where the kernel says they are. Returns early when vLLM ends."""
    last: list[int] = []
    looks = 0
    while looks < STEADY_LOOKS:
        try:
            child.wait(LOOK_S)
            return
        except subprocess.TimeoutExpired:
            pass
        workers = find_workers(child.pid, len(plan.ranks))
        sizes = [sum(w.pages.values()) for w in workers]
        bound = len(workers) == len(plan.ranks) and all(w.cpus for w in workers)
        looks = looks + 1 if bound and sizes == last else 0
        last = sizes
    for line in worker_lines(workers, plan):
        say(line)


@dataclass(frozen=True)
class Worker:
    """What the kernel says of a process of vLLM."""

    name: str
    pid: int
    cpus: tuple[int, ...]  # of its threads that are bound to one CPU each
    pages: dict[int, int]  # NUMA node -> KiB


def find_workers(root: int, count: int) -> list[Worker]:
    """vLLM's workers below a process, in their order; without any, the engines, which then are the workers."""
    names = {pid: _name(pid) for pid in _descendants(root)}
    for pattern in (r"VLLM::Worker", r"VLLM::EngineCore"):
        found = sorted((name, pid) for pid, name in names.items() if re.match(pattern, name))
        if len(found) == count:
            return [Worker(name, pid, _bound_cpus(pid), _pages(pid)) for name, pid in found]
    return []


def worker_lines(workers: Sequence[Worker], plan: Placement) -> list[str]:
    """A line a worker, with what is not as it was asked for."""
    lines = []
    for worker, asked in zip(workers, plan.ranks, strict=True):
        total = max(1, sum(worker.pages.values()))
        memory = ", ".join(f"node {n} {100 * kib / total:.0f} %" for n, kib in sorted(worker.pages.items()))
        wrong = []
        if not set(worker.cpus) <= set(asked.cpus):
            wrong.append(f"cpus {format_list(asked.cpus)} were asked for")
        elsewhere = sum(kib for n, kib in worker.pages.items() if n not in asked.mem_nodes)
        if asked.mem_nodes and elsewhere > total / 10:
            wrong.append(f"memory on node {format_list(asked.mem_nodes)} was asked for")
        lines.append(
            f"{'warning: ' if wrong else ''}{worker.name} (pid {worker.pid}): threads on cpus "
            f"{format_list(worker.cpus)}, {total // 1024} MiB: {memory}{'; ' if wrong else ''}{'; '.join(wrong)}"
        )
    return lines


def _descendants(root: int) -> Iterator[int]:
    todo = [root]
    while todo:
        pid = todo.pop()
        yield pid
        for task in _entries(f"/proc/{pid}/task"):
            todo += [int(word) for word in _read(f"/proc/{pid}/task/{task}/children").split()]


def _name(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def _bound_cpus(pid: int) -> tuple[int, ...]:
    found = set()
    for task in _entries(f"/proc/{pid}/task"):
        allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", _read(f"/proc/{pid}/task/{task}/status"))
        if allowed is not None and len(cpus := parse_list(allowed[1])) == 1:
            found.add(cpus[0])
    return tuple(sorted(found))


def _pages(pid: int) -> dict[int, int]:
    """KiB of anonymous memory by node."""
    kib: dict[int, int] = {}
    for line in _read(f"/proc/{pid}/numa_maps").splitlines():
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        if size is None or " anon=" not in line:
            continue
        for node, pages in re.findall(r" N(\d+)=(\d+)", line):
            kib[int(node)] = kib.get(int(node), 0) + int(pages) * int(size[1])
    return kib


def _entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # it ended
        return []


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # it ended, or is somebody else's
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
