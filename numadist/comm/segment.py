"""How ranks come to share a segment: rank 0 makes a memfd, the others open it through /proc."""

import errno
import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import Store

from numadist import _native
from numadist.comm.choose import one_shot_bytes
from numadist.config import config
from numadist.errors import CommError, ConfigError
from numadist.log import get_logger

log = get_logger(__name__)

KEY = "numadist/segment"
# A key left by an earlier run (file stores keep them) points nowhere or to a stranger until rank 0 overwrites
# it, so a segment that cannot be opened is tried again this long before it is an error.
STALE_S = 20.0


def nodes_of_ranks(global_ranks: Sequence[int]) -> list[list[int]] | None:
    """Memory nodes of the group's ranks from numarun's NUMADIST_NODE_MAP; None: not started by numarun."""
    text = config().node_map
    if not text:
        return None
    try:
        all_ranks = [[int(node) for node in part.split(",")] for part in text.split("|")]
        return [all_ranks[rank] for rank in global_ranks]
    except (ValueError, IndexError):
        raise ConfigError(
            f"NUMADIST_NODE_MAP={text!r} must list the nodes of every rank, like `0|1`; this group has ranks "
            f"{list(global_ranks)}"
        ) from None


def _machine_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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


def _publish(store: Store, world: int, nodes: list[list[int]] | None) -> tuple[int, int]:
    """Make the segment and tell the others; returns (fd, nonce)."""
    nonce = secrets.randbits(64)
    fd = _create(world, nonce, nodes)
    place = {"machine": _machine_id(), "pid": os.getpid(), "fd": fd, "nonce": nonce}
    store.set(KEY, json.dumps(place))
    return fd, nonce


def _open_published(text: bytes, rank: int, world: int, timeout_ns: int, spin_ns: int) -> int:
    """Handle on the segment a store value names. Raises: OSError if it is stale or out of reach."""
    place = json.loads(text)
    if place["machine"] != _machine_id():
        raise OSError(errno.EXDEV, "rank 0 runs on another machine")
    fd = os.open(f"/proc/{place['pid']}/fd/{place['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _native.open_group(fd, rank, world, place["nonce"], timeout_ns, spin_ns)
    finally:
        os.close(fd)


def open_group(store: Store, rank: int, world: int, timeout_s: float, global_ranks: Sequence[int]) -> int:
    """Handle of a group whose ranks have all mapped one segment. Raises: CommError; what the store raises."""
    timeout_ns, spin_ns = int(timeout_s * 1e9), config().spin_us * 1000
    if rank == 0:
        fd, nonce = _publish(store, world, nodes_of_ranks(global_ranks))
        try:
            handle = _native.open_group(fd, 0, world, nonce, timeout_ns, spin_ns)
            code = _native.lib.nd_group_connect(handle)
        finally:
            os.close(fd)
    else:
        handle = _open_when_published(store, rank, world, timeout_ns, spin_ns)
        code = _native.lib.nd_group_connect(handle)
    if code > 0:
        log.warning(
            "pidfd_open is not allowed here: a rank that dies is noticed only when the timeout is over"
        )
    if code < 0:
        from numadist.comm.watch import error_of

        error = error_of(handle, code, "being made", rank, world, timeout_s)
        _native.lib.nd_group_close(handle)
        raise error
    return handle


def _open_when_published(store: Store, rank: int, world: int, timeout_ns: int, spin_ns: int) -> int:
    deadline = time.monotonic() + min(STALE_S, timeout_ns / 1e9)
    while True:
        text = store.get(KEY)
        try:
            return _open_published(text, rank, world, timeout_ns, spin_ns)
        except OSError as error:
            if time.monotonic() > deadline:
                raise CommError(
                    f"rank {rank} cannot open the segment of rank 0 ({text.decode()}): {error.strerror}. "
                    f"All ranks must run on one machine, under one user, in one pid namespace."
                ) from None
        # Yield to the process that serves the store; there is no event for an overwritten key.
        time.sleep(0.002)
