"""One process compiles what several want, and the others take its result from torch's cache on disk.

Ranks start together and want the same code, or most of it: whoever comes first compiles a thing, the others go on with
the next and come back.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from numadist.log import get_logger
from numadist.progress import progress

log = get_logger(__name__)

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

# A process that is stopped while it compiles holds up no other for longer.
PATIENCE_S = 180.0
_POLL_S = 0.02


def shared_out(
    wanted: Mapping[Key, str], compile: Callable[[Key], Result], patience_s: float = PATIENCE_S
) -> dict[Key, Result]:
    """compile(key) of every key; things that processes compile at the same time have the same text."""
    done: dict[Key, Result] = {}
    begin = time.monotonic()
    todo = list(wanted)
    with progress("compiling", len(todo), "parts") as advance:
        while todo:
            waiting = []
            for key in todo:
                late = time.monotonic() - begin > patience_s
                with _claimed(wanted[key]) as mine:
                    if not mine and not late:
                        waiting.append(key)
                        continue
                    done[key] = compile(key)
                advance(1)
            if len(waiting) == len(todo):
                time.sleep(_POLL_S)
            todo = waiting
    return done


@contextmanager
def _claimed(text: str) -> Iterator[bool]:
    """Whether no other process is at it; none is until this ends, or this process does."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        folder = Path(cache_dir()) / "numadist-claims"
        folder.mkdir(parents=True, exist_ok=True)
        # Few, and empty: the kernel drops a lock with the process that holds it.
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:2]
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as reason:
        log.debug("every process compiles for itself: %s", reason)
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = True
    except OSError:
        mine = False
    try:
        yield mine
    finally:
        os.close(fd)
