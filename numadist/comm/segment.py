"""How the ranks of one machine come to share a segment: the first makes a memfd, the others open it through /proc."""

import contextlib
import errno
import json
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from numadist import _native, errors
from numadist.comm.algorithms import one_shot_bytes
from numadist.comm.failures import STALE_HINT, error_of
from numadist.comm.members import Member
from numadist.config import config
from numadist.errors import CommError, PeerLost
from numadist.log import get_logger

log = get_logger(__name__)

# A key left by an earlier run (file stores keep them) points nowhere or to a stranger until the first rank
# overwrites it, so a segment that cannot be opened is tried again this long before it is an error.
STALE_S = 20.0
POLL_S = 0.2  # between two looks whether the first rank still lives


def key_of(ranks: Sequence[int]) -> str:
    """Where the first of these ranks publishes their segment."""
    return f"numadist/segment/{ranks[0]}"


def nodes_of(members: Sequence[Member]) -> list[list[int]] | None:
    """Memory nodes of each rank; None: a rank was not started by numarun, so nothing is bound."""
    return [list(m.nodes) for m in members] if all(m.nodes for m in members) else None


def _create(world: int, nonce: int, nodes: list[list[int]] | None) -> int:
    try:
        return _native.create_segment(world, nonce, one_shot_bytes(world), nodes)
    except OSError as error:
        if nodes is None or error.errno not in (errno.EPERM, errno.EINVAL, errno.ENOSYS):
            raise CommError(f"cannot make a shared segment for {world} ranks: {error.strerror}") from None
        log.warning(
            "segment not bound to nodes %s (%s): its pages go where they are first touched",
            nodes,
            error.strerror,
        )
        return _create(world, nonce, None)


def _open(fd: int, local_rank: int, world: int, nonce: int, timeout_ns: int) -> int:
    return _native.open_group(fd, local_rank, world, nonce, timeout_ns, config().spin_us * 1000)


def _open_published(place: dict[str, Any], local_rank: int, world: int, timeout_ns: int) -> int:
    """Handle on a published segment. Raises: OSError if it is stale or out of reach."""
    fd = os.open(f"/proc/{place['pid']}/fd/{place['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _open(fd, local_rank, world, place["nonce"], timeout_ns)
    finally:
        os.close(fd)


def open_group(
    store: Store, ranks: Sequence[int], rank: int, members: Sequence[Member], timeout_s: float
) -> int:
    """Handle of a group of `ranks`, all on this machine, once all have mapped one segment.

    rank is one of them, members are theirs, in the same order. Raises: CommError; what the store raises.
    """
    _check_namespaces(ranks, rank, members)
    if rank != ranks[0]:
        handle = _open_when_published(store, ranks, rank, members[0], timeout_s)
        _connect(handle, ranks, rank, members, timeout_s)
        return handle
    try:
        return _make(store, ranks, members, timeout_s)
    except CommError as error:
        # The others may still be on their way, to a segment that will not be.
        place = {"pid": os.getpid(), "error": str(error), "kind": type(error).__name__}
        store.set(key_of(ranks), json.dumps(place))
        raise


def _make(store: Store, ranks: Sequence[int], members: Sequence[Member], timeout_s: float) -> int:
    """The first rank's handle."""
    world, nonce = len(ranks), secrets.randbits(64)
    fd = _create(world, nonce, nodes_of(members))
    try:
        store.set(key_of(ranks), json.dumps({"pid": os.getpid(), "fd": fd, "nonce": nonce}))
        handle = _open(fd, 0, world, nonce, int(timeout_s * 1e9))
        _connect(handle, ranks, ranks[0], members, timeout_s)
    finally:
        os.close(fd)
    return handle


def _connect(
    handle: int, ranks: Sequence[int], rank: int, members: Sequence[Member], timeout_s: float
) -> None:
    """Wait for the other ranks; closes the handle if they do not come. Raises: CommError."""
    code = _native.connect_group(handle, [m.pid for m in members])
    if code != 0:
        name = (
            "being made"
            if ranks[-1] == len(ranks) - 1
            else f"being made by ranks {list(ranks)}, here 0 and on,"
        )
        error = error_of(handle, code, name, ranks.index(rank), len(ranks), timeout_s)
        _native.lib.nd_group_close(handle)
        raise error


def _check_namespaces(ranks: Sequence[int], rank: int, members: Sequence[Member]) -> None:
    mine = members[ranks.index(rank)].pid_namespace
    for other, member in zip(ranks, members, strict=True):
        if member.pid_namespace != mine:
            raise CommError(
                f"rank {rank} is in pid namespace {mine}, rank {other} in {member.pid_namespace} of the same machine: "
                f"they cannot open each other's memory through /proc. Give their containers one pid namespace (docker "
                f"run --pid=host or --pid=container:NAME), or set NUMADIST_MACHINE to another word in each, and they "
                f"talk over Gloo as machines do."
            )


def _open_when_published(
    store: Store, ranks: Sequence[int], rank: int, first: Member, timeout_s: float
) -> int:
    """The handle of a rank that is not the first of its machine."""
    until = time.monotonic() + timeout_s
    stale_until = time.monotonic() + min(STALE_S, timeout_s)
    with _watched(first.pid) as is_gone:
        while True:
            place = _published(store, ranks, first, until, is_gone)
            reason = place.get("error")
            if reason is None:
                try:
                    return _open_published(place, ranks.index(rank), len(ranks), int(timeout_s * 1e9))
                except OSError as error:
                    reason = error.strerror
                    if error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                        stale_until = 0.0
            elif place["pid"] == first.pid:
                raise getattr(errors, place["kind"])(f"as rank {ranks[0]} says: {reason}")
            if time.monotonic() > stale_until:
                raise CommError(
                    f"rank {rank} cannot open the segment of rank {ranks[0]} (pid {place['pid']}): {reason}. "
                    f"Ranks of one machine must run under one user, with /proc mounted and not hidden (hidepid)."
                )
            # Yield to the process that serves the store; there is no event for an overwritten key.
            time.sleep(0.002)


def _published(
    store: Store, ranks: Sequence[int], first: Member, until: float, is_gone: Callable[[], bool]
) -> dict[str, Any]:
    """What the first rank published. Raises: PeerLost when it died before; what the store raises at the end."""
    key = key_of(ranks)
    while True:
        left_s = max(until - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=min(POLL_S, left_s)))
            place: dict[str, Any] = json.loads(store.get(key))
            return place
        except RuntimeError:  # each kind of store has its own
            if is_gone():
                raise PeerLost(
                    f"rank {ranks[0]} (pid {first.pid}) is gone before the group was made. {STALE_HINT}"
                ) from None
            if left_s < POLL_S:
                raise


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[Callable[[], bool]]:
    """A function that tells whether a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda: True
        return
    except OSError:  # a kernel or container without pidfds
        yield lambda: not os.path.exists(f"/proc/{pid}")
        return
    try:
        yield lambda: bool(select.select([fd], [], [], 0)[0])
    finally:
        os.close(fd)
