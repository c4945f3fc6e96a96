"""NUMADIST_TRACE: what the collectives of a process were, how often, of which sizes, and what they cost.

Written when the process ends: FILE.r0.PID.json for programs and FILE.r0.PID.txt for people.
"""

import atexit
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numadist._native import Coll, Op
from numadist._native_trace import OTHER_BYTES, begin_trace, traced
from numadist.comm.dtypes import CODES
from numadist.config import config
from numadist.log import get_logger

log = get_logger(__name__)

_DTYPES = {code: str(dtype).removeprefix("torch.") for dtype, code in CODES.items()}
_REDUCING = {Coll.ALL_REDUCE, Coll.REDUCE_SCATTER, Coll.REDUCE, Coll.ALL_REDUCE_FUSED}


@dataclass(frozen=True)
class Row:
    """Calls of one kind in one group. bytes: of one rank's part; None: many sizes. Times are none for messages."""

    group: str
    num_ranks: int
    operation: str
    dtype: str
    bytes: int | None
    calls: int
    total_ms: float
    wait_ms: float  # of total_ms: waiting for peers


_rank: int | None = None  # of this process in its first group, which names the files
_open: dict[int, Any] = {}  # groups by their handles
_rows: list[Row] = []  # of groups that are closed


def begin(handle: int, group: Any) -> None:
    """Trace a new group, if NUMADIST_TRACE asks for it."""
    global _rank
    if not config().trace:
        return
    if _rank is None:
        _rank = group.rank()
        atexit.register(_write)
    begin_trace(handle)
    _open[handle] = group


def collect(handle: int) -> None:
    """Keep what was counted of a group that is about to be closed."""
    if (group := _open.pop(handle, None)) is not None:
        _rows.extend(_row(entry, group.group_name, group.size()) for entry in traced(handle))


def _row(entry: Any, group: str, num_ranks: int) -> Row:
    call = entry.call
    coll = Coll(call.coll)
    operation = coll.name.lower()
    if coll in _REDUCING:
        operation += f" {Op(call.op).name}"
    return Row(
        group or "(no name)",
        num_ranks,
        operation,
        "" if coll == Coll.BARRIER else _DTYPES.get(call.dtype, ""),
        None if call.bytes == OTHER_BYTES else call.bytes,
        entry.num_calls,
        entry.total_ns / 1e6,
        entry.wait_ns / 1e6,
    )


def table(rows: Iterable[Row]) -> str:
    """The rows for people, the most costly first."""
    head = f"{'group':<12} {'ranks':>5} {'operation':<22} {'dtype':<9} {'bytes':>12} {'calls':>9} {'total ms':>10} "
    lines = [f"{head}{'waiting ms':>10} {'us a call':>10}"]
    for r in sorted(rows, key=lambda r: (-r.total_ms, -r.calls)):
        size = "other sizes" if r.bytes is None else str(r.bytes)
        lines.append(
            f"{r.group[:12]:<12} {r.num_ranks:>5} {r.operation:<22} {r.dtype:<9} {size:>12} {r.calls:>9} "
            f"{r.total_ms:>10.3f} {r.wait_ms:>10.3f} {1e3 * r.total_ms / r.calls:>10.2f}"
        )
    return "\n".join(lines) + "\n"


def _write() -> None:
    for handle in list(_open):
        collect(handle)
    stem = f"{config().trace}.r{_rank}.{os.getpid()}"
    try:
        Path(f"{stem}.json").write_text(json.dumps([asdict(row) for row in _rows], indent=1) + "\n")
        Path(f"{stem}.txt").write_text(table(_rows))
    except OSError as error:
        log.warning("NUMADIST_TRACE: cannot write %s.json: %s", stem, error.strerror)
