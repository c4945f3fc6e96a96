"""The core's counts of calls by kind, by ctypes; csrc/nd_core.h is their manual."""

import ctypes
from ctypes import POINTER, c_int, c_uint64, c_void_p

from numadist._native import Call, check, lib


class Traced(ctypes.Structure):
    """NdTraced."""

    _fields_ = [("call", Call), ("num_calls", c_uint64), ("total_ns", c_uint64), ("wait_ns", c_uint64)]


OTHER_BYTES = 2**64 - 1  # ND_OTHER_BYTES
lib.nd_group_trace.argtypes = [c_void_p]
lib.nd_group_traced.argtypes = [c_void_p, POINTER(Traced), c_int]


def begin_trace(handle: int) -> None:
    """Count the group's calls by kind, from the first one on. Raises: NativeError."""
    check(lib.nd_group_trace(handle), "trace a group")


def traced(handle: int) -> list[Traced]:
    """What was counted; nothing where no trace was begun."""
    rows = (Traced * max(lib.nd_group_traced(handle, None, 0), 0))()
    count = lib.nd_group_traced(handle, rows, len(rows))
    return list(rows[: max(count, 0)])
