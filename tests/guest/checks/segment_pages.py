# guest two_nodes: python
"""A group of two ranks (threads here) bound to nodes 0 and 1: where the pages of its segment really are."""

import errno
import json
import os
import threading
from pathlib import Path

from numadist import _native

PAGE = os.sysconf("SC_PAGESIZE")
NODES = [[0], [1]]
COUNT = 300_000  # float32, several slots


def pages_off_their_node(address: int, num_bytes: int) -> tuple[int, dict[str, int]]:
    """(touched pages that are not on the node they are bound to, touched bound pages by node)."""
    wrong, by_node = 0, {"0": 0, "1": 0}
    for i, node in enumerate(_native.page_nodes(address, num_bytes)):
        bound = _native.bound_nodes(address + i * PAGE)
        if node == -errno.ENOENT or not bound:
            continue
        wrong += bound != {node}
        by_node[str(node)] += 1
    return wrong, by_node


def run_rank(rank: int) -> None:
    handle = _native.open_group(fd, rank, 2, 7, 60 * 10**9, 0)
    assert _native.lib.nd_group_connect(handle, None) == 0
    source, result = _native.map_memory(COUNT * 4), _native.map_memory(COUNT * 4)
    for _ in range(3):
        code = _native.lib.nd_all_reduce(handle, source, result, COUNT, _native.Dtype.I32, _native.Op.SUM)
        assert code == 0, code
    barrier.wait()
    barrier.wait()
    _native.lib.nd_group_close(handle)


barrier = threading.Barrier(3)
fd = _native.create_segment(2, 7, 0, NODES)
threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
barrier.wait()
maps = Path("/proc/self/maps").read_text().splitlines()
spans = [line.split()[0].split("-") for line in maps if "memfd:numadist" in line]
begin, end = (int(word, 16) for word in spans[0])
wrong, by_node = pages_off_their_node(begin, end - begin)
barrier.wait()
for thread in threads:
    thread.join()

print(json.dumps({"segment_wrong": wrong, "segment_by_node": by_node}))
