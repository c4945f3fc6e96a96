"""CPUs and memory policy of this process: set, then read back, because the kernel narrows in silence."""

import errno
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from numadist import _syscalls
from numadist.errors import BindError
from numadist.topology.cpuset import format_list, parse_list

POLICIES = ("bind", "preferred", "local", "interleave", "none")


class PolicyRefused(BindError):
    """The kernel or a seccomp filter refused a memory-policy call; CPUs can still be pinned."""


@dataclass(frozen=True)
class Binding:
    """What the kernel keeps for this process now. policy None: the kernel does not tell."""

    cpus: tuple[int, ...]
    policy: str | None
    mem_nodes: tuple[int, ...]


def current_binding() -> Binding:
    """Affinity and memory policy of the calling thread, as the kernel says."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    try:
        mode, nodes = _syscalls.get_mempolicy()
    except OSError:
        return Binding(cpus, None, ())
    return Binding(cpus, _syscalls.POLICY_NAMES.get(mode, str(mode)), nodes)


def warn_if_narrowed(started_on: str) -> None:
    """Warn when this process no longer has all CPUs numarun started it on (NUMADIST_CPUS, a kernel list).

    Call once torch is loaded: libgomp applies OMP_PLACES and GOMP_CPU_AFFINITY to the main thread then.
    """
    now = os.sched_getaffinity(0)
    if not now < set(parse_list(started_on)):
        return
    warnings.warn(
        f"this rank was started on CPUs {started_on} and now has only {format_list(now)}, and so has all it starts: "
        "OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY acted when torch was loaded; unset them",
        RuntimeWarning,
        stacklevel=2,
    )


def bind_cpus(cpus: Iterable[int]) -> None:
    """Run this thread and what it starts on exactly these CPUs.

    Raises: BindError, also when the kernel silently kept only some of them.
    """
    asked = tuple(sorted(cpus))
    try:
        os.sched_setaffinity(0, asked)
    except OSError as error:
        raise BindError(
            f"asked for CPUs {format_list(asked)}, sched_setaffinity says {error.strerror}; "
            "they are offline or outside this process's cpuset"
        ) from None
    kept = tuple(sorted(os.sched_getaffinity(0)))
    if kept != asked:
        raise BindError(
            f"asked for CPUs {format_list(asked)}, kernel kept {format_list(kept)}; "
            "the others are offline or outside this process's cpuset"
        )


def bind_memory(policy: str, nodes: Iterable[int]) -> tuple[int, ...]:
    """Set the memory policy of this thread and what it starts; return the nodes the kernel kept.

    policy: one of POLICIES. `none` changes nothing; `local` takes no nodes.
    Cost: pages already touched stay where they are. Raises: PolicyRefused.
    """
    asked = tuple(sorted(nodes))
    if policy == "none":
        return asked
    name, mode = _mode(policy, asked)
    kept: tuple[int, ...] = ()
    try:
        _set_policy(mode, () if policy == "local" else asked)
        kept = _syscalls.get_mempolicy()[1]
    except OSError as error:
        where = (
            f", {'node' if len(asked) == 1 else 'nodes'} {format_list(asked)}" if policy != "local" else ""
        )
        raise PolicyRefused(f"set_mempolicy({name}{where}): {os.strerror(error.errno or 0)}") from error
    return asked if policy == "local" else kept


def _mode(policy: str, nodes: tuple[int, ...]) -> tuple[str, int]:
    if policy == "preferred" and len(nodes) > 1:
        return "MPOL_PREFERRED_MANY", _syscalls.MPOL_PREFERRED_MANY
    mode = {name: mode for mode, name in _syscalls.POLICY_NAMES.items()}[policy]
    return f"MPOL_{policy.upper()}", mode


def _set_policy(mode: int, nodes: tuple[int, ...]) -> None:
    try:
        _syscalls.set_mempolicy(mode, nodes)
    except OSError as error:
        # Before Linux 5.15 there is no PREFERRED_MANY; PREFERRED keeps the first node, which the caller sees.
        if mode != _syscalls.MPOL_PREFERRED_MANY or error.errno != errno.EINVAL:
            raise
        _syscalls.set_mempolicy(_syscalls.MPOL_PREFERRED, nodes)
