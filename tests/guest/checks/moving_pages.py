# guest two_nodes: python
"""Pages that the kernel moves to and fro while it is asked where they are: none is missed, small or huge.

Nor those that automatic NUMA balancing, on by default, has marked meanwhile.
"""

import ctypes
import json
import os
import threading

from numadist import _native

PAGE = os.sysconf("SC_PAGESIZE")
HUGE = 2 << 20
FEW = 16 * PAGE
SYS_MOVE_PAGES = 279  # x86-64
MPOL_MF_MOVE = 2
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15
ASKED = 200

libc = ctypes.CDLL(None, use_errno=True)


def aligned(advice: int) -> int:
    """A touched range of HUGE bytes, of small pages or of a huge one."""
    address = -(-_native.map_memory(2 * HUGE) // HUGE) * HUGE
    assert libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), advice) == 0
    assert _native.touch_memory(address, HUGE) == 0
    return address


def move(address: int, num_bytes: int, done: threading.Event, moves: list[int]) -> None:
    count = num_bytes // PAGE
    pages = (ctypes.c_void_p * count)(*range(address, address + num_bytes, PAGE))
    status = (ctypes.c_int * count)()
    while not done.is_set():
        targets = (ctypes.c_int * count)(*[len(moves) % 2] * count)
        if libc.syscall(SYS_MOVE_PAGES, 0, ctypes.c_ulong(count), pages, targets, status, MPOL_MF_MOVE) < 0:
            raise OSError(ctypes.get_errno(), "move_pages")
        moves.append(sum(node == len(moves) % 2 for node in status))


def missed(address: int, num_bytes: int) -> dict[str, int]:
    done, moves = threading.Event(), []
    mover = threading.Thread(target=move, args=(address, num_bytes, done, moves))
    mover.start()
    count = sum(node < 0 for _ in range(ASKED) for node in _native.page_nodes(address, num_bytes))
    done.set()
    mover.join()
    return {"missed": count, "moved": sum(moves)}


untouched = _native.page_nodes(_native.map_memory(4 * PAGE), 4 * PAGE)
small, huge = missed(aligned(MADV_NOHUGEPAGE), FEW), missed(aligned(MADV_HUGEPAGE), HUGE)
print(json.dumps({"small": small, "huge": huge, "untouched": untouched}))
