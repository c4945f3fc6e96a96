"""A barrier that tells which ranks are missing and leaves the group usable.

Rank 0 hears from every rank and then answers each. The wording of its errors is that of torch.
"""

import time

from numadist import _native
from numadist._native import Coll, Dtype
from numadist.errors import CollectiveTimeout, CommError


def monitored_barrier(handle: int, rank: int, world: int, timeout_s: float, wait_all: bool, tag: int) -> None:
    """Raises: CollectiveTimeout naming the first missing rank, with wait_all all of them. tag: new for each call."""
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        _hear_all(handle, world, timeout_s, deadline, wait_all, tag)
        for peer in range(1, world):
            _exchange(handle, Coll.SEND, peer, tag, deadline)
    else:
        _exchange(handle, Coll.SEND, 0, tag, deadline)
        if not _exchange(handle, Coll.RECV, 0, tag, deadline):
            raise CollectiveTimeout(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: no answer in {timeout_s * 1e3:g} ms. Rank 0 tells who is missing."
            )


def _hear_all(handle: int, world: int, timeout_s: float, deadline: float, wait_all: bool, tag: int) -> None:
    missing = []
    for peer in range(1, world):
        if timeout_s <= 0 or (time.monotonic() >= deadline and not wait_all):
            raise CollectiveTimeout(f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1e3:g} ms.")
        if _exchange(handle, Coll.RECV, peer, tag, deadline):
            continue
        missing.append(peer)
        if not wait_all:
            break
    if missing:
        who = "Rank" if len(missing) == 1 else "Ranks"
        raise CollectiveTimeout(
            f"{who} {', '.join(map(str, missing))} failed to pass monitoredBarrier in {timeout_s * 1e3:g} ms."
        )


def _exchange(handle: int, coll: Coll, peer: int, tag: int, deadline: float) -> bool:
    """Send or receive an empty message; False if it is not done by the deadline."""
    code, request = _native.start_message(handle, coll, 0, 0, Dtype.U8, peer, tag)
    if code == 0:
        code = _native.lib.nd_message_poll(handle, request, max(0, int((deadline - time.monotonic()) * 1e9)))
        _native.lib.nd_message_free(handle, request)
    if code < 0:
        raise CommError(f"monitored_barrier: {coll.name.lower()} with rank {peer} failed, errno {-code}")
    return code == 0
