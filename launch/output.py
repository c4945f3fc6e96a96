"""Carry the ranks' output to ours in whole lines, never blocking the launcher on a slow reader."""

import os
import selectors
import time
from collections import deque

MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in pieces
MAX_QUEUED_BYTES = 1 << 20  # above this, ranks wait for the reader as they would on a plain pipe
# A pipe that poll() calls writable takes this much without blocking (POSIX PIPE_BUF).
WRITE_BYTES = 4096
READ_BYTES = 1 << 16
PROMPT_S = 0.2
CLEAR_LINE = b"\x1b[K"  # from the cursor to its end


class Sink:
    """One of our own streams: a queue that is written only when the reader has room."""

    def __init__(self, fd: int, before_line: bytes = b""):
        """before_line: what makes room for a line on a terminal that shows a bar."""
        self.fd, self.before_line = fd, before_line
        self.closed = False
        self.open_line: object = None  # who has shown the beginning of a line
        self._queue: deque[bytes] = deque()
        self.queued_bytes = 0

    def put(self, data: bytes) -> None:
        if not self.closed and data:
            self._queue.append(data)
            self.queued_bytes += len(data)

    def write_some(self) -> None:
        """Write once, at most what cannot block, and whole lines where they fit: such a write is not broken into.

        A reader that is gone closes the sink.
        """
        if not self._queue:
            return
        chunk = self._queue.popleft()
        end = chunk.rfind(b"\n", 0, WRITE_BYTES) + 1 or WRITE_BYTES
        try:
            written = os.write(self.fd, chunk[:end])
        except BlockingIOError:
            written = 0
        except OSError:  # EPIPE: the reader is gone; EIO: the terminal is
            self.closed = True
            self.drop()
            return
        if written < len(chunk):
            self._queue.appendleft(chunk[written:])
        self.queued_bytes -= written

    def drop(self) -> None:
        self._queue.clear()
        self.queued_bytes = 0


class Stream:
    """One output stream of one rank: a pipe on its side, lines for a sink and a log file on ours."""

    def __init__(self, prefix: str, sink: Sink | None, log_path: str | None, append: bool = False):
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.prefix = prefix.encode()
        self.sink = sink
        self.ended = False
        self.last_line = ""
        self._partial = b""
        self._since_s = 0.0
        self._log = (
            open(log_path, "ab" if append else "wb", buffering=0) if log_path else None  # noqa: SIM115
        )

    def close_write_end(self) -> None:
        os.close(self.write_fd)

    def read_some(self) -> bool:
        """Take what the pipe holds now, at most READ_BYTES; False at the end or when it is empty."""
        try:
            data = os.read(self.read_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.ended = True
            return False
        self._write_log(data)
        if not self._partial:
            self._since_s = time.monotonic()
        lines = (self._partial + data).splitlines(keepends=True)
        # A line is whole at its newline; a carriage return may be the first half of one.
        whole = lines[-1].endswith(b"\n") or len(lines[-1]) > MAX_LINE_BYTES
        self._partial = b"" if whole else lines.pop()
        self._emit(lines)
        return True

    def finish(self) -> None:
        """Read no more; pass on the last line even without its newline."""
        self.ended = True
        if self._partial:
            self._emit([self._partial])
            self._partial = b""

    def close(self) -> None:
        os.close(self.read_fd)
        if self._log:
            self._log.close()

    @property
    def has_partial(self) -> bool:
        return self.sink is not None and bool(self._partial)

    def show_prompt(self) -> None:
        """Pass on a line without its newline once it has stood PROMPT_S: it waits for an answer."""
        if self.sink and self.has_partial and time.monotonic() - self._since_s >= PROMPT_S:
            self.sink.put(self._begin() + self._partial)
            self.sink.open_line = self
            self._partial = b""

    def _begin(self) -> bytes:
        """What stands before a line: nothing if its beginning is shown already and nobody spoke since."""
        assert self.sink is not None
        if self.sink.open_line is self:
            return b""
        return (b"\n" if self.sink.open_line else b"") + self.sink.before_line + self.prefix

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            if self.sink:
                self.sink.put(f"numarun: warning: {self._log.name} ends here: {error.strerror}\n".encode())
            self._log.close()
            self._log = None

    def _emit(self, lines: list[bytes]) -> None:
        """A carriage return ends a line too: progress bars of several ranks would overwrite each other."""
        texts = [line.rstrip(b"\r\n") for line in lines]
        said = next((text for text in reversed(texts) if text.strip()), None)
        if said is not None:
            self.last_line = said.decode(errors="replace").strip()
        if self.sink and texts:
            first = self._begin()
            self.sink.put(first + b"\n".join((texts[0], *(self.prefix + text for text in texts[1:]))) + b"\n")
            self.sink.open_line = None


def sinks(bar_on: str = "") -> dict[int, Sink]:
    """Of our stdout and stderr: one for both where they go to the same place, so that no line breaks into another.

    bar_on: name of the terminal on which rank 0 shows a bar.
    """

    def sink(fd: int) -> Sink:
        return Sink(fd, CLEAR_LINE if bar_on and os.isatty(fd) and os.ttyname(fd) == bar_on else b"")

    out = sink(1)
    return {1: out, 2: out if _same_file(1, 2) else sink(2)}


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.samestat(os.fstat(first), os.fstat(second))
    except OSError:
        return False


def poll_selector() -> selectors.PollSelector:
    """poll, because epoll refuses regular files and our stdout may be one."""
    return selectors.PollSelector()
