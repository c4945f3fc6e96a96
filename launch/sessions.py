"""End all of a job: every process in the sessions of its ranks, also when the launcher itself is killed.

A rank that dies with the launcher (its death signal) leaves its children, such as data loaders, to init.
"""

import contextlib
import os
import signal
from collections.abc import Iterable

ROUNDS = 10  # a process may fork while it is looked for


def kill_sessions(sessions: Iterable[int]) -> None:
    """SIGKILL to every process whose session is one of these; a daemon that made a session of its own is none."""
    wanted = set(sessions)
    for _ in range(ROUNDS):
        found = [pid for pid in _processes() if _session(pid) in wanted]
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if not found:
            return


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def _session(pid: int) -> int | None:
    """None for one that has ended, a zombie included."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may contain anything.
            state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(session)


class Guardian:
    """A process that outlives the launcher by a moment and kills what was left of its ranks' sessions."""

    def __init__(self) -> None:
        self._write_fd = -1
        self._pid = 0

    def start(self) -> None:
        """Fork it. It sees the launcher's end as the end of a pipe, whatever ended it."""
        read_fd, self._write_fd = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(read_fd)
            return
        try:
            _guard(read_fd)
        finally:
            os._exit(0)

    def watch(self, session: int) -> None:
        """A rank has started; its process id is its session's."""
        self._tell(b"+%d\n" % session)

    def forget(self, session: int) -> None:
        """The rank and its session are gone, and the number may become another's."""
        self._tell(b"-%d\n" % session)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it: the run goes on without
            os.write(self._write_fd, line)

    def stop(self) -> None:
        """End it; every session has been forgotten."""
        os.close(self._write_fd)
        os.waitpid(self._pid, 0)


def _guard(read_fd: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # a reader of our output must see its end
        os.dup2(null, fd)
    os.dup2(read_fd, 3)
    os.closerange(4, 1 << 16)  # the pipe's other end is among them
    told = b""
    while data := os.read(3, 4096):
        told += data
    live: set[int] = set()
    for line in told.split():
        (live.add if line.startswith(b"+") else live.discard)(int(line[1:]))
    kill_sessions(live)
