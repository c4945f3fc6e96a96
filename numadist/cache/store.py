"""Entries in a folder, by name: whole or not there, whoever writes them, and whenever that one is killed.

An entry may be code to its reader, as a pickle is. So the folder and its files must belong to this user, and be closed
to writes by others.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from numadist.log import get_logger

log = get_logger(__name__)

_MAGIC = b"numadist 1\n"
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES
_SUFFIX = ".entry"
_LIMIT_BYTES = 1 << 30
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# A temporary file of this age has lost its writer.
_ABANDONED_S = 3600.0
_POLL_S = 0.02
_NUM_LOCKS = 256

_warned: set[str] = set()


class Store:
    """Names are words without a slash. Failures of the disk are misses, with a reason at DEBUG."""

    def __init__(self, folder: Path, limit_bytes: int = _LIMIT_BYTES):
        """limit_bytes: of all entries; those that were not used for longest go first."""
        self.folder, self.limit_bytes = folder, limit_bytes

    def read(self, name: str) -> bytes | None:
        """What was written last under the name; None where there is none, or none that can be trusted."""
        with self._opened() as folder:
            if folder is None:
                return None
            try:
                return self._checked(folder, name)
            except FileNotFoundError:
                return None
            except OSError as reason:
                log.debug("%s in %s is ignored: %s", name, self.folder, reason)
                return None

    def _checked(self, folder: int, name: str) -> bytes | None:
        fd = os.open(name + _SUFFIX, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb") as file:
            why = _distrust(os.fstat(fd), stat.S_ISREG)
            if why:
                self._warn(f"{name}{_SUFFIX} in it {why}")
                return None
            found = self._payload(name, file.read())
            if found is not None:
                with contextlib.suppress(OSError):  # a disk that is only read
                    os.utime(fd)
            return found

    def write(self, name: str, payload: bytes) -> None:
        """Put an entry in the place of what the name had."""
        with self._opened(make=True) as folder:
            if folder is None:
                return
            hidden = f".{name}.{os.getpid()}.{time.monotonic_ns()}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(hidden, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(_MAGIC + _digest(payload) + payload)
                os.replace(hidden, name + _SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as reason:
                log.debug("%s is not kept in %s: %s", name, self.folder, reason)
                with contextlib.suppress(OSError):
                    os.unlink(hidden, dir_fd=folder)
            with contextlib.suppress(OSError):
                self._evict(folder)

    @contextlib.contextmanager
    def claimed(self, name: str, patience_s: float) -> Iterator[None]:
        """Hold the name's lock, which processes that would make the same entry wait for, but no longer than this."""
        with self._opened(make=True) as folder:
            fd = None if folder is None else self._lock(folder, name, time.monotonic() + patience_s)
            try:
                yield
            finally:
                if fd is not None:
                    os.close(fd)

    def _lock(self, folder: int, name: str, deadline: float) -> int | None:
        """A descriptor that holds the lock; None if it could not be had. The kernel drops it with its process."""
        lock = f"{int(hashlib.sha256(name.encode()).hexdigest(), 16) % _NUM_LOCKS:02x}.lock"
        fd = None
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(lock, flags, 0o600, dir_fd=folder)
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return fd
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_S)
        except OSError as reason:
            log.debug("%s is made without a lock: %s", name, reason)
            if fd is not None:
                os.close(fd)
            return None

    @contextlib.contextmanager
    def _opened(self, make: bool = False) -> Iterator[int | None]:
        """The folder's descriptor; None without one that can be trusted."""
        try:
            if make:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        except OSError as reason:
            log.debug("no cache: %s", reason)
            yield None
            return
        try:
            why = _distrust(os.fstat(fd), stat.S_ISDIR)
            if why:
                self._warn(f"it {why}")
            yield None if why else fd
        finally:
            os.close(fd)

    def _warn(self, why: str) -> None:
        """Once a process."""
        text = f"the cache folder {self.folder} is not used: {why}"
        if text not in _warned:
            _warned.add(text)
            log.warning("%s; chmod or remove it, or set NUMADIST_CACHE_DIR", text)

    def _payload(self, name: str, data: bytes) -> bytes | None:
        head, payload = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
        if head == _MAGIC + _digest(payload):
            return payload
        why = "is torn or changed" if head.startswith(_MAGIC) else "is no entry of this version"
        log.debug("%s in %s is ignored: it %s", name, self.folder, why)
        return None

    def _evict(self, folder: int) -> None:
        """Remove what exceeds the limit, and what killed writers left."""
        found: list[tuple[float, int, str]] = []
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if name.endswith(_SUFFIX):
                    found.append((about.st_mtime, about.st_size, name))
                elif name.startswith(".") and time.time() - about.st_mtime > _ABANDONED_S:
                    os.unlink(name, dir_fd=folder)
        total = sum(size for _, size, _ in found)
        for _, size, name in sorted(found):
            if total <= self.limit_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            total -= size


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()


def _distrust(about: os.stat_result, is_kind: Callable[[int], bool]) -> str:
    """Why what lies there may be another user's; empty if it cannot be."""
    if not is_kind(about.st_mode):
        return "is of another kind"
    if about.st_uid != os.geteuid():
        return f"belongs to user {about.st_uid}"
    if about.st_mode & _OTHERS_WRITE:
        return "can be written by other users"
    return ""
