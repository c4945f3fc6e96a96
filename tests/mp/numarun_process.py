"""Start numarun on a small script and watch it from outside: no sleeps, every wait is on an event."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from numadist.topology.sysfs import read_machine

T = TypeVar("T")

# numarun gives each rank cores of its own and refuses to share one out.
needs_two_cores = pytest.mark.skipif(
    len(read_machine().cores) < 2, reason="needs two CPU cores for two ranks of numarun"
)

NUMARUN = [sys.executable, "-m", "numadist.launch.cli"]
LIMIT_S = 300  # only a hang reaches it


# torch 2.13's Gloo can abort a rank at interpreter exit, after the script's last line: its worker thread drops a
# tensor while Python is going down. Seen in 2 of 10 runs of a DDP script under torchrun with numadist not loaded.
GLOO_ABORT = re.compile(r"terminate called without an active exception|exitcode: -6")
GLOO_ATTEMPTS = 6


def run_gloo(start: Callable[[], T], ended: Callable[[T], str | None]) -> T:
    """Run a script on Gloo again when Gloo aborted at exit, and only then. ended: stderr of a failed run, else None."""
    for _ in range(GLOO_ATTEMPTS - 1):
        done = start()
        stderr = ended(done)
        if stderr is None or not GLOO_ABORT.search(stderr):
            return done
    return start()


def stderr_if_failed(done: subprocess.CompletedProcess) -> str | None:
    return done.stderr if done.returncode else None


def run(script: Path, *options: str, args: tuple[str, ...] = (), **kwargs) -> subprocess.CompletedProcess:
    """numarun to its end."""
    command = [*NUMARUN, *options, str(script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **kwargs)


def start(script: Path, *options: str, **kwargs) -> subprocess.Popen:
    """numarun in the background, stdout and stderr as text pipes unless given."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    kwargs = {**pipes, "preexec_fn": _hear_stop_signals, **kwargs}
    return subprocess.Popen([*NUMARUN, *options, str(script)], **kwargs)


def _hear_stop_signals() -> None:
    """As from a terminal: numarun leaves ignored what it finds ignored, as in tests run behind nohup or `&`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def ready_ranks(process: subprocess.Popen, count: int) -> dict[int, int]:
    """Rank -> pid, once `count` ranks have printed `ready PID`; other lines are dropped."""
    pids: dict[int, int] = {}
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, f"numarun ended before {count} ranks were ready: {process.stderr.read()}"
        found = re.match(r"\[r(\d+)\] ready (\d+)$", line)
        if found:
            pids[int(found[1])] = int(found[2])
    return pids


def wait_for_end(pid: int, limit_s: float) -> bool:
    """True when the process ends (a zombie counts) within the limit."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], limit_s)[0])
    finally:
        os.close(fd)


def summary_of(stderr: str) -> list[str]:
    """The failure summary: from the line that names the failing rank to the end."""
    lines = stderr.splitlines()
    first = [i for i, line in enumerate(lines) if "failed first: " in line]
    return lines[first[0] :] if first else []
