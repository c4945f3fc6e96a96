"""Who is in a group: what its ranks tell each other through the store before they share memory."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from numadist.config import config
from numadist.errors import CollectiveTimeout
from numadist.topology.cpuset import parse_list

# What an earlier life of a job left in the store may stand there so long before it is taken for the truth.
REPLACED_WITHIN_S = 5.0


@dataclass(frozen=True)
class Member:
    """One rank, by its own words."""

    machine: str  # ranks that share memory have the same
    pid: int
    pid_namespace: str  # the one that pid counts in
    nodes: tuple[int, ...]  # memory nodes; empty: not started by numarun


def this_process() -> Member:
    nodes = parse_list(config().nodes) if config().nodes else ()
    return Member(_machine(), os.getpid(), os.readlink("/proc/self/ns/pid"), tuple(nodes))


@functools.cache
def _machine() -> str:
    """The running kernel, and what NUMADIST_MACHINE says: copies of one virtual machine have one boot id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{config().machine}@{boot}"


def meet(store: Store, rank: int, world: int, timeout_s: float) -> list[Member]:
    """All ranks' members, in rank order. Raises: CollectiveTimeout naming who did not come."""
    if world == 1:
        return [this_process()]
    keys = [f"numadist/member/{r}" for r in range(world)]
    me = this_process()
    store.set(keys[rank], json.dumps(asdict(me)))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # each kind of store has its own
        late = [r for r, key in enumerate(keys) if not _has(store, key)]
        if not late:
            raise
        raise CollectiveTimeout(
            f"rank {rank}: group being made: not arrived within {timeout_s:g} s: "
            f"{', '.join(f'rank {r} (never joined)' for r in late)}. Look what these ranks do (py-spy dump "
            f"--pid), or raise the timeout of init_process_group."
        ) from error
    until = time.monotonic() + min(REPLACED_WITHIN_S, timeout_s)
    while True:
        found = [_member(store.get(key)) for key in keys]
        # torchrun keeps its store when it restarts ranks: entries of the life before are replaced one by one.
        if not any(_is_gone(member, me) for member in found) or time.monotonic() > until:
            return found
        time.sleep(0.002)


def _member(text: bytes) -> Member:
    entry = json.loads(text)
    return Member(**{**entry, "nodes": tuple(entry["nodes"])})


def _is_gone(member: Member, me: Member) -> bool:
    """Whether it is known to have ended: a process that we would see."""
    here = (member.machine, member.pid_namespace) == (me.machine, me.pid_namespace)
    return here and not os.path.exists(f"/proc/{member.pid}")


def _has(store: Store, key: str) -> bool:
    with contextlib.suppress(RuntimeError):
        return bool(store.check([key]))
    return False


def machines_of(members: Sequence[Member]) -> list[list[int]]:
    """The ranks of each machine, machines in the order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        found.setdefault(member.machine, []).append(rank)
    return list(found.values())
