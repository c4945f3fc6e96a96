"""Why a collective failed, in words: who is missing, who called what."""

import errno
import os

from numadist import _native
from numadist._native import Call, Coll, Op
from numadist.comm.dtypes import NAMES
from numadist.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

_SHOWN_CALLS = 4
REDUCING = {Coll.ALL_REDUCE, Coll.REDUCE_SCATTER, Coll.REDUCE, Coll.ALL_REDUCE_FUSED}
# What a call's `root` says.
_ROOT_IS = dict.fromkeys((Coll.BROADCAST, Coll.SCATTER, Coll.GATHER, Coll.REDUCE), "root") | {
    Coll.SEND: "to",
    Coll.RECV: "from",
    Coll.ALL_REDUCE_FUSED: "rows of",
}

# For a rank that is missing before the group was made.
STALE_HINT = "Its own output says why; if it only starts now, an earlier run's store was used: take a new file or port."


def describe(call: Call) -> str:
    """E.g. `all_reduce(SUM, float32, 4096 bytes)`."""
    coll = Coll(call.coll)
    if coll in (Coll.BARRIER, Coll.CONNECT):
        return coll.name.lower()
    words = [Op(call.op).name] if coll in REDUCING else []
    words += [NAMES.get(call.dtype, f"dtype {call.dtype}"), f"{call.bytes} bytes"]
    if call.root >= 0 and coll in _ROOT_IS:
        words.append(f"{_ROOT_IS[coll]} {call.root}")
    return f"{coll.name.lower()}({', '.join(words)})"


def _missing(handle: int, world: int, joined: bool) -> str:
    """The ranks that have not arrived, as this rank saw them when it failed."""
    peers = _native.group_peers(handle, world)
    words = {0: "alive" if joined else "never joined", -1: "dead"}
    late = [f"rank {r} ({words[state]})" for r, state in enumerate(peers) if state != 1]
    return ", ".join(late) or "nobody any more"


def _before(handle: int) -> str:
    """The calls this rank made before the one that failed."""
    calls = [describe(call) for call in _native.group_history(handle)[:-1][-_SHOWN_CALLS:]]
    return f" Calls before it on this rank: {', '.join(calls)}." if calls else ""


def error_of(handle: int, code: int, name: str, rank: int, world: int, timeout_s: float) -> CommError:
    """The exception for a negative code of a collective on a group."""
    if code == -errno.ECHILD:
        return CommError(
            f"rank {rank}: group {name!r} belongs to the process that made it, this is a fork of it (process "
            f"{os.getpid()}). Use torch.distributed in the parent only, or start workers with spawn."
        )
    report = _native.group_report(handle)
    mine = describe(report.mine) if report.mine.coll else "no collective"
    where = f"group {name!r}, collective {report.seq}, {mine}"
    seen_by = "" if report.reporter == rank else f" (reported by rank {report.reporter})"
    if code == -errno.ETIMEDOUT:
        joined = report.mine.coll != Coll.CONNECT
        missing = _missing(handle, world, joined) if report.reporter == rank else f"rank {report.peer}"
        return CollectiveTimeout(
            f"rank {rank}: {where}: not arrived within {timeout_s:g} s: {missing}{seen_by}. "
            f"Look what these ranks do (py-spy dump --pid), or raise the timeout of init_process_group."
            f"{_before(handle)}"
        )
    if code == -errno.EOWNERDEAD:
        return PeerLost(
            f"rank {rank}: {where}: rank {report.peer} (pid {report.peer_pid}) is gone{seen_by}. "
            f"{STALE_HINT if report.mine.coll == Coll.CONNECT else 'Its own output says why; the group cannot go on.'}"
        )
    if code == -errno.EPROTO:
        return CollectiveMismatch(
            f"group {name!r}, collective {report.seq}: rank {report.reporter} called {mine}, "
            f"rank {report.peer} called {describe(report.theirs)}. "
            f"All ranks must make the same calls in the same order.{_before(handle)}"
        )
    if code == -errno.ECANCELED:
        return CommError(f"rank {rank}: group {name!r} was aborted by rank {report.reporter}.")
    return CommError(f"rank {rank}: group {name!r}: {_native.errno_name(-code)} ({os.strerror(-code)})")
