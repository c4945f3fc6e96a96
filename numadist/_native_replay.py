"""Native calls recorded while Python makes them, to be made again without it; csrc/kernels/replay.cpp.

Operators call the core through `call`, which notes what it calls on threads that record. A recording holds addresses:
whoever replays it keeps the memory behind them, and writes new inputs where the old ones were.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

from torch import Tensor

from numadist._native import check, lib

MAX_ARGS = 48  # ND_REPLAY_ARGS

OnError = Callable[[int], None]


class _Call(ctypes.Structure):
    """NdReplayCall."""

    _fields_ = [
        ("function", c_void_p),
        ("args", POINTER(c_int64)),
        ("num_args", c_int32),
        ("returns_code", c_int32),
    ]


lib.nd_replay.argtypes = [POINTER(_Call), c_size_t, POINTER(c_size_t)]


class Recording:
    """Calls in order. refused: why they cannot be made again, empty if they can."""

    def __init__(self) -> None:
        self.refused = ""
        self._calls: list[tuple[int, list[int], OnError | None]] = []
        self._kept: list[Any] = []
        self._program: Any = None

    def note(self, function: int, args: tuple[Any, ...], on_error: OnError | None = None) -> None:
        """on_error: called with the function's code if that is not 0; None for a function without one."""
        values = []
        for arg in args:
            if isinstance(arg, Tensor):
                self._kept.append(arg)
                arg = arg.data_ptr()
            elif isinstance(arg, ctypes.Structure):
                self._kept.append(arg)
                arg = ctypes.addressof(arg)
            if not (arg is None or isinstance(arg, int)):
                self.refused = f"an argument of type {type(arg).__name__}"
                return
            values.append(int(arg or 0))
        if len(values) > MAX_ARGS:
            self.refused = f"a call of {len(values)} arguments"
        self._calls.append((function, values, on_error))

    def __len__(self) -> int:
        return len(self._calls)

    def keep(self, tensor: Tensor) -> Tensor:
        """Memory that calls read or write."""
        self._kept.append(tensor)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory that is kept."""
        storage = tensor.untyped_storage().data_ptr()
        return any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == storage for t in self._kept)

    def replay(self) -> None:
        """Make all calls again. Raises: what on_error of the first that fails raises."""
        if self._program is None:
            program = (_Call * len(self._calls))()
            for entry, (function, values, on_error) in zip(program, self._calls, strict=True):
                entry.function, entry.num_args = function, len(values)
                entry.args = (c_int64 * max(1, len(values)))(*values)
                entry.returns_code = on_error is not None
            self._program = program
        failed = c_size_t()
        code = lib.nd_replay(self._program, len(self._calls), byref(failed))
        if code:
            if failed.value < len(self._calls) and (on_error := self._calls[failed.value][2]) is not None:
                on_error(code)
            check(code, "a recorded call")


class _ThisThread(threading.local):
    """What it records. The value of the class spares threads without a recording an AttributeError a look."""

    recording: Recording | None = None


this_thread = _ThisThread()


@contextmanager
def recording() -> Iterator[Recording]:
    """Note the calls that this thread makes."""
    this_thread.recording = new = Recording()
    try:
        yield new
    finally:
        this_thread.recording = None


def call(function: Any, *args: Any, what: Callable[[], str]) -> None:
    """A function of the core that returns a code. Raises: NativeError, saying `what`."""
    if (found := active()) is not None:
        found.note(address_of(function), args, lambda code: check(code, what()))
    if code := function(*args):
        check(code, what())


def active() -> Recording | None:
    """This thread's recording."""
    return this_thread.recording


def contiguous(x: Tensor) -> Tensor:
    """x, or a copy in order, which cannot be recorded."""
    if x.is_contiguous():
        return x
    if (found := active()) is not None:
        found.refused = f"a copy of a tensor of {list(x.shape)}"
    return x.contiguous()


def kept(x: Tensor) -> Tensor:
    """A result, kept if this thread records."""
    return x if (found := active()) is None else found.keep(x)


def address_of(function: Any) -> int:
    """Of a ctypes function."""
    return ctypes.cast(function, c_void_p).value or 0


def symbol_of(library: str, name: str) -> int:
    """Address of a function of a library that is loaded already."""
    return address_of(getattr(ctypes.CDLL(library), name))
