# guest two_nodes: python
"""Pages that the kernel moves to and fro while it is asked where they are: none is missed."""

import ctypes
import json
import os
import threading

from numadist import _native

PAGE = os.sysconf("SC_PAGESIZE")
COUNT = 4096
SYS_MIGRATE_PAGES = 256  # x86-64
ASKED = 50

address = _native.map_memory(COUNT * PAGE)
assert _native.lib.nd_touch(address, COUNT * PAGE) == 0
libc = ctypes.CDLL(None, use_errno=True)
done = threading.Event()
moves = 0


def move() -> None:
    global moves
    while not done.is_set():
        here = ctypes.c_ulong(1 << moves % 2)
        there = ctypes.c_ulong(2 >> moves % 2)
        if libc.syscall(SYS_MIGRATE_PAGES, 0, 64, ctypes.byref(here), ctypes.byref(there)) < 0:
            raise OSError(ctypes.get_errno(), "migrate_pages")
        moves += 1


mover = threading.Thread(target=move)
mover.start()
missed = sum(node < 0 for _ in range(ASKED) for node in _native.page_nodes(address, COUNT * PAGE))
done.set()
mover.join()
untouched = _native.page_nodes(_native.map_memory(4 * PAGE), 4 * PAGE)
print(json.dumps({"missed": missed, "moves": moves, "untouched": untouched}))
