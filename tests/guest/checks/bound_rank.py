# guest two_nodes: numarun
# guest four_nodes: numarun
"""What the kernel says about this rank: its CPUs, its policy, and where freshly touched pages are."""

import json
import mmap
import os
import re
from pathlib import Path

from numadist.binding import current_binding

NUM_PAGES = 2048
PAGE_BYTES = mmap.PAGESIZE


def numa_maps() -> list[str]:
    return Path("/proc/self/numa_maps").read_text().splitlines()


def pages_by_node(buffer: mmap.mmap) -> dict[str, int]:
    """Pages of the one mapping that holds NUM_PAGES or more, from /proc/self/numa_maps."""
    for i in range(NUM_PAGES):
        buffer[i * PAGE_BYTES] = 1
    for line in numa_maps():
        pages = {node: int(count) for node, count in re.findall(r"N(\d+)=(\d+)", line)}
        if sum(pages.values()) >= NUM_PAGES and "anon=" in line and "file=" not in line:
            return pages
    return {}


binding = current_binding()
buffer = mmap.mmap(-1, NUM_PAGES * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print(
    json.dumps(
        {
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
            "cpus": binding.cpus,
            "policy": binding.policy,
            "mem_nodes": binding.mem_nodes,
            "pages": pages_by_node(buffer),
            # The policy of every mapping, the interpreter's own included: bound before exec.
            "map_policies": sorted({line.split()[1] for line in numa_maps()}),
        }
    )
)
