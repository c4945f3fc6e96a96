"""Work objects: what torch gives back for a collective or a message, done or still under way.

Tasks run without the GIL in the core. Python is needed only to finish one: copy staged results, complete the future.
Whoever waits does that; for futures, which nobody may wait for, threads of the process do. Callbacks of a future may
wait for other works, so whoever completes one holds nothing that another work needs.
"""

import atexit
import contextlib
import datetime
import errno
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from numadist import _native
from numadist.comm.collective_calls import CollectiveCall
from numadist.comm.dtypes import NAMES
from numadist.errors import CollectiveMismatch, CollectiveTimeout


class DoneWork(Work):
    """A finished call."""

    def __init__(self, result: list[Any]):
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def result(self) -> list[Any]:
        return self._result


# What blocking calls return: torch waits for it and gives the user nothing.
DONE = DoneWork([])


class PendingWork(Work):
    """A call under way. Subclasses know whom to ask; whichever thread first sees the call done finishes it, once."""

    def __init__(self, result: list[Any], finish: Callable[[], None]):
        super().__init__()
        self._result = result
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._unsettled: torch.futures.Future[Any] | None = None  # the same, until somebody completes it
        self._done = False
        self._outcome: Exception | bool = False  # what the core said
        # Works of one stream end in the order they began, so one thread can wait for all of them.
        self.stream: Hashable = self
        self._poll_lock = threading.RLock()  # held while the core is asked, possibly for long
        self._future_lock = threading.Lock()

    def _poll(self, timeout_ns: int) -> Exception | bool:
        """True if the call is done, False if it was not within the time (0 asks without waiting), or why it failed."""
        raise NotImplementedError

    def _advance(self, timeout_ns: int, complete: bool = True) -> bool:
        """Whether the call is over, now or within the time. What Python has to do then waits without `complete`."""
        if self._done:
            return True
        limit_s = -1.0 if timeout_ns == _native.FOREVER else timeout_ns / 1e9
        if not self._poll_lock.acquire(timeout=limit_s):
            return False
        try:
            if self._outcome is False:
                self._outcome = self._poll(timeout_ns)
            if self._outcome is False:
                return False
            if complete and not self._done:
                self._complete(self._outcome if isinstance(self._outcome, Exception) else None)
            return True
        finally:
            self._poll_lock.release()

    def _complete(self, error: Exception | None) -> None:
        if error is None and self._finish is not None:
            try:
                self._finish()
            except Exception as failed:  # the call is over all the same, and its waiters must learn why
                error = failed
        self._error, self._finish = error, None
        with self._future_lock:
            self._done = True

    def _settle(self) -> None:
        """Complete the future of a work that is done, if nobody has; its callbacks run here."""
        with self._future_lock:
            future, self._unsettled = self._unsettled, None
        if future is None:
            return
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._result)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until done; a timeout of zero or less is none. Raises: CommError, CollectiveTimeout."""
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        if not self._advance(int(seconds * 1e9) if seconds > 0 else _native.FOREVER):
            raise CollectiveTimeout(
                f"not done within the {seconds:g} s of this wait; the call itself goes on"
            )
        if self._future is not None:
            self._settle()
            with contextlib.suppress(Exception):  # this work's own error, raised below
                self._future.wait()  # has its value before callbacks run, so this waits for none of them
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._advance(0)

    def is_success(self) -> bool:
        return self._advance(0) and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        with self._future_lock:
            if self._future is not None:
                return self._future
            future = self._future = self._unsettled = torch.futures.Future()
            done = self._done
        if done:
            self._settle()
        else:
            _completer.take(self)
        return future


class CollectiveWork(PendingWork):
    """Collectives that are made one after the other in the background; the work is done when all are."""

    def __init__(self, calls: list[CollectiveCall], result: list[Any]):
        super().__init__(result, self._copy_back)
        self._calls = calls

    def _copy_back(self) -> None:
        for call in self._calls:
            call.copy_back()
        self._calls = []


class TaskWork(CollectiveWork):
    """Collectives on the worker thread that the core keeps for a group."""

    def __init__(
        self,
        handle: int,
        calls: list[CollectiveCall],
        error_of: Callable[[int], Exception],
        result: list[Any],
    ):
        super().__init__(calls, result)
        self._handle = handle
        self._error_of = error_of
        self.stream = handle
        self._tasks = [_native.start(handle, call.arguments) for call in calls]
        self._first_error: Exception | None = None

    def _poll(self, timeout_ns: int) -> Exception | bool:
        while self._tasks:
            code = _native.wait_task(self._handle, self._tasks[0], timeout_ns)
            if code is None:
                return False
            self._tasks.pop(0)
            if code != 0 and self._first_error is None:
                self._first_error = self._error_of(code)
        return self._first_error or True


class MessageWork(PendingWork):
    """One send or receive."""

    def __init__(
        self,
        handle: int,
        request: int,
        buffer: Tensor,
        error_of: Callable[[int], Exception],
        finish: Callable[[], None],
    ):
        super().__init__([buffer], finish)
        self._handle = handle
        self._request = request
        self._num_bytes, self._dtype = buffer.nbytes, buffer.dtype
        self._error_of = error_of
        self.source = -1

    def _poll(self, timeout_ns: int) -> Exception | bool:
        if timeout_ns == 0:
            code = _native.lib.nd_message_test(self._handle, self._request)
        else:
            limit_ns = 0 if timeout_ns == _native.FOREVER else timeout_ns
            code = _native.lib.nd_message_wait(self._handle, self._request, limit_ns)
        if code == 1:
            return False
        self.source, num_bytes, dtype = _native.message_source(self._request)
        _native.lib.nd_message_free(self._handle, self._request)
        if code == -errno.EMSGSIZE:
            return wrong_message(self.source, num_bytes, dtype, self._num_bytes, self._dtype)
        return True if code == 0 else self._error_of(code)

    def _source_rank(self) -> int:
        self.wait()
        return self.source

    source_rank = _source_rank


def wrong_message(source: int, sent: int, code: int, expected: int, dtype: torch.dtype) -> Exception:
    theirs, ours = NAMES.get(code, f"dtype {code}"), str(dtype).removeprefix("torch.")
    return CollectiveMismatch(
        f"recv: rank {source} sent {sent} bytes of {theirs}, the tensor to receive it has {expected} of {ours}. "
        f"Both sides must name the same shape and dtype; the message is dropped."
    )


class _Completer:
    """Daemon threads that wait for works whose futures somebody holds: one thread a stream, in the order they came.

    A thread gives its stream away before it completes a future: the callbacks may wait for the stream's later works.
    When the interpreter ends, a thread that asks for the GIL is unwound, which aborts the process if C++ of torch is on
    its stack. So the process ends after the threads have left torch, and none goes there later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_torch = threading.Condition(self._lock)
        self._streams: dict[Hashable, deque[PendingWork]] = {}  # those that a thread serves
        self._idle: list[queue.SimpleQueue[Hashable]] = []  # where threads without a stream wait for one
        self._in_torch = 0  # threads that complete a work
        self._ending = False

    def take(self, work: PendingWork) -> None:
        with self._lock:
            if (works := self._streams.get(work.stream)) is not None:
                works.append(work)
                return
            self._streams[work.stream] = deque([work])
            self._hand_over(work.stream)

    def end(self) -> None:
        """Keep the threads out of torch. A callback that waits for what never comes holds this up for END_S only."""
        with self._lock:
            self._ending = True
            self._left_torch.wait_for(lambda: self._in_torch == 0, END_S)

    def _hand_over(self, stream: Hashable) -> None:
        """To an idle thread, or to a new one. Call with the lock."""
        if self._idle:
            self._idle.pop().put(stream)
        else:
            threading.Thread(target=self._run, args=(stream,), name="numadist-futures", daemon=True).start()

    def _run(self, stream: Hashable) -> None:
        todo: queue.SimpleQueue[Hashable] = queue.SimpleQueue()
        while True:
            self._streams[stream][0]._advance(_native.FOREVER, complete=False)
            with self._lock:
                if self._ending:
                    return
                self._in_torch += 1
            self._complete_first(stream)
            with self._lock:
                self._in_torch -= 1
                self._left_torch.notify_all()
                self._idle.append(todo)
            stream = todo.get()

    def _complete_first(self, stream: Hashable) -> None:
        works = self._streams[stream]
        works[0]._advance(0)
        with self._lock:
            work = works.popleft()
            if works:
                self._hand_over(stream)
            else:
                del self._streams[stream]
        work._settle()


# The end of a process waits so long for callbacks of futures that run.
END_S = 10.0

_completer = _Completer()
atexit.register(_completer.end)
