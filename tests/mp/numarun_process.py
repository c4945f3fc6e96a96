"""Start numarun on a small script and watch it from outside: no sleeps, every wait is on an event."""

import os
import re
import select
import subprocess
import sys
from pathlib import Path

NUMARUN = [sys.executable, "-m", "numadist.launch.cli"]
LIMIT_S = 50  # far above any expected time: only a hang reaches it


def run(script: Path, *options: str, args: tuple[str, ...] = (), **kwargs) -> subprocess.CompletedProcess:
    """numarun to its end."""
    command = [*NUMARUN, *options, str(script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **kwargs)


def start(script: Path, *options: str, **kwargs) -> subprocess.Popen:
    """numarun in the background, stdout and stderr as text pipes unless given."""
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs}
    return subprocess.Popen([*NUMARUN, *options, str(script)], **kwargs)


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
