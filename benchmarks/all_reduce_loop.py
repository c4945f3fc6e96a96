"""Build and call all_reduce_loop.c: the same timed loop around our core and around each MPI. Standard library only."""

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
LIMITS = ("memcpy", "line-exchange")  # what the machine allows
WHAT = ("all_reduce", *LIMITS)
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC"]


def build(library: str, compiler: str, options: Sequence[str]) -> None:
    subprocess.run([compiler, *FLAGS, str(SOURCE), *options, "-o", library], check=True)


def pin(rank: int, ranks: int) -> None:
    """To a CPU of its own, while there are enough."""
    cpus = range(os.cpu_count() or 1)
    if ranks <= len(cpus):
        os.sched_setaffinity(0, {cpus[rank]})


class Loop:
    """The loop in this rank. Pin the rank first: threads of an MPI inherit it."""

    def __init__(self, library: str, counter: str, rank: int, ranks: int, group: int | None):
        # Global: plugins of an MPI look for its symbols.
        self._lib = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self._lib.loop_open.argtypes = [ctypes.c_void_p]
        self._lib.loop_meet_in.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self._lib.loop_run.argtypes = [
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_double),
        ]
        if self._lib.loop_open(group) < 0 or self._lib.loop_meet_in(counter.encode(), rank, ranks) != 0:
            raise RuntimeError(f"{library}: the loop cannot start")

    def run(self, num_bytes: int, dtype: str, calls: int, what: str = "all_reduce") -> list[float]:
        """Seconds of each call."""
        seconds = (ctypes.c_double * calls)()
        if self._lib.loop_run(WHAT.index(what), num_bytes, dtype == "bfloat16", calls, seconds) != 0:
            raise RuntimeError(f"all_reduce of {num_bytes} bytes failed or has a wrong sum")
        return list(seconds)

    def close(self) -> None:
        if hasattr(self._lib, "loop_close"):
            self._lib.loop_close()
