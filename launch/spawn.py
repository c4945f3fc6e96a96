"""Start one rank: in the child, before exec, bound to its CPUs and memory and tied to the launcher's life.

The child binds itself before the interpreter starts, so interpreter, imports and every allocation are
already on the rank's node and no page has to be moved.
"""

import errno
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from numadist import _syscalls
from numadist.binding import PolicyRefused, bind_cpus, bind_memory
from numadist.errors import BindError
from numadist.launch.place import RankPlacement
from numadist.topology.cpuset import format_list

EXIT_LAUNCHER_FAILED = 125
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127


class SpawnError(BindError):
    """A rank could not be started as asked."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Start:
    """Everything the child needs. stdin, stdout, stderr: file descriptors, None keeps the launcher's."""

    placement: RankPlacement
    argv: Sequence[str]
    environment: dict[str, str]
    strict: bool = False
    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None


@dataclass
class Started:
    """A running child. warnings are its own report, complete when exec has happened."""

    pid: int
    report_fd: int
    warnings: list[str] = field(default_factory=list)


def spawn(start: Start) -> Started:
    """Fork and exec one rank. Call from the main thread: the death signal is tied to the forking thread."""
    read_fd, write_fd = os.pipe()  # closed by exec, so end of file means the rank runs
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(start, launcher, write_fd)
    os.close(write_fd)
    return Started(pid, read_fd)


def await_exec(started: Started) -> None:
    """Read the child's report until it has become the rank. Raises: SpawnError."""
    with os.fdopen(started.report_fd, encoding="utf-8") as report:
        for line in report:
            entry = json.loads(line)
            if entry["exit_code"] is not None:
                raise SpawnError(entry["message"], entry["exit_code"])
            started.warnings.append(entry["message"])


def _child(start: Start, launcher: int, report_fd: int) -> None:
    """Become the rank; never returns."""

    def report(message: str, exit_code: int | None = None) -> None:
        os.write(report_fd, (json.dumps({"message": message, "exit_code": exit_code}) + "\n").encode())
        if exit_code is not None:
            os._exit(exit_code)

    try:
        _tie_to_launcher(launcher)
        os.setsid()
        _redirect(start)
        _bind(start, report)
        os.execvpe(start.argv[0], list(start.argv), start.environment)
    except OSError as error:
        code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_CANNOT_EXECUTE
        report(f"cannot execute {start.argv[0]!r}: {error.strerror}", code)
    except BaseException as error:
        report(f"rank {start.placement.rank}: {type(error).__name__}: {error}", EXIT_LAUNCHER_FAILED)
    finally:
        os._exit(EXIT_LAUNCHER_FAILED)


def _tie_to_launcher(launcher: int) -> None:
    signal.set_wakeup_fd(-1)  # a signal that comes before exec is not the launcher's
    _syscalls.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the call above took effect
        os._exit(EXIT_LAUNCHER_FAILED)
    # Python ignores SIGPIPE, and an ignored signal stays ignored through exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _redirect(start: Start) -> None:
    for target, source in enumerate((start.stdin, start.stdout, start.stderr)):
        if source is not None:
            os.dup2(source, target)


def _bind(start: Start, report: Callable[..., None]) -> None:
    """Pin CPUs, then set the memory policy; report what was refused or narrowed."""
    placement, fatal = start.placement, EXIT_LAUNCHER_FAILED if start.strict else None
    try:
        bind_cpus(placement.cpus)
    except BindError as error:
        report(f"rank {placement.rank}: {error}", fatal)
    try:
        kept = bind_memory(placement.mem_policy, placement.mem_nodes)
    except PolicyRefused as error:
        why, remedy = _cause_and_remedy(error)
        if start.strict:
            report(f"{error}{why}; {remedy}", fatal)
        elif placement.mem_policy != "local":  # local by first touch is what remains anyway
            cause = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
            report(
                f"{cause}{why}; CPUs are pinned, memory will be local by first touch but may spill. {remedy}"
            )
        return
    lost = set(placement.mem_nodes) - set(kept)
    if placement.mem_policy != "none" and lost:
        report(
            f"rank {placement.rank}: asked memory nodes {format_list(placement.mem_nodes)}, "
            f"kernel kept {format_list(kept)} (node {format_list(lost)} has no memory)",
            fatal,
        )


def _cause_and_remedy(error: PolicyRefused) -> tuple[str, str]:
    """The cause only where it is known: EPERM is a container's."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EPERM:
        return (
            " (container without CAP_SYS_NICE or a seccomp filter)",
            f"docker: --cap-add SYS_NICE; {SILENCE}",
        )
    return "", SILENCE


SILENCE = "silence: --mem local"
