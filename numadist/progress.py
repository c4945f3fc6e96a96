"""What a start is at, for whoever waits: a bar on a terminal, elsewhere a line every few seconds.

numarun says where, to rank 0 alone (NUMADIST_PROGRESS); without it nothing is said. Whatever is done soon is not told.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from numadist.config import config

LINES = "lines"
# What takes no longer is not told; then how often a line, and a bar, comes.
SILENT_S, LINE_S, BAR_S = 2.0, 5.0, 0.25
_BAR_WIDTH = 24
_COLUMNS = 80  # of a terminal that does not know
_CLEAR = "\r\x1b[K"  # the line, with the cursor at its start

_busy = threading.Lock()

Advance = Callable[[float], None]


@contextlib.contextmanager
def progress(what: str, total: float = 0.0, unit: str = "") -> Iterator[Advance]:
    """Tell of a phase while the block runs, which calls what it gets with each amount it has done.

    total: amount of the whole phase; 0: not known. A phase inside another is not told.
    """
    where = config().progress
    if not where or not _busy.acquire(blocking=False):
        yield lambda amount: None
        return
    teller = _Teller(where, what, total, unit)
    try:
        with teller:
            yield teller.advance
    finally:
        _busy.release()


def terminal_or_lines() -> str:
    """For NUMADIST_PROGRESS: the name of the terminal that our standard error is, else lines."""
    try:
        return os.ttyname(2)
    except OSError:
        return LINES


class _Teller(threading.Thread):
    """Tells from a thread of its own, so that phases need not ask for the time."""

    def __init__(self, where: str, what: str, total: float, unit: str):
        super().__init__(daemon=True)
        self.where, self.what, self.total, self.unit = where, what, total, unit
        self.done, self.begin = 0.0, time.monotonic()
        self._ended = threading.Event()

    def advance(self, amount: float) -> None:
        self.done += amount

    def __enter__(self) -> "_Teller":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        if self._ended.wait(SILENT_S):
            return
        if self.where == LINES:
            self._tell_lines()
            return
        try:
            fd = os.open(self.where, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # the terminal is gone
            return
        with contextlib.suppress(OSError), open(fd, "w", encoding="utf-8") as terminal:
            # A terminal may stop background processes that write to it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            self._draw(terminal)

    def _tell_lines(self) -> None:
        while True:
            sys.stderr.write(f"{self.text()}\n")
            sys.stderr.flush()
            if self._ended.wait(LINE_S):
                return

    def _draw(self, terminal: IO[str]) -> None:
        """The cursor stays at the start of the line, for the next bar or for a line of anybody's."""
        ended = False
        while not ended:
            columns = os.get_terminal_size(terminal.fileno()).columns or _COLUMNS
            told = (self.bar(min(_BAR_WIDTH, columns // 3)) + self.text())[: columns - 1]
            terminal.write(f"{_CLEAR}{told}\r")
            terminal.flush()
            ended = self._ended.wait(BAR_S)
        terminal.write(_CLEAR)

    def bar(self, width: int) -> str:
        if not self.total:
            return ""
        filled = round(width * min(1.0, self.done / self.total))
        return f"[{'#' * filled}{'.' * (width - filled)}] "

    def text(self) -> str:
        """What is done of how much, and the time left; without a total the time so far."""
        passed = time.monotonic() - self.begin
        if not self.total:
            return f"{self.what}: {passed:.0f} s"
        left = f", {passed * (self.total - self.done) / self.done:.0f} s left" if self.done else ""
        return f"{self.what}: {self.done:.0f}/{self.total:.0f} {self.unit}{left}"
