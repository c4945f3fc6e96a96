# guest four_nodes: python
"""A rank bound to node 1 touches more than the node has: the kernel kills it, with memory free elsewhere."""

import json
import subprocess
import sys

HUNGRY = """
import mmap, signal
size = 1300 << 20
memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, size, mmap.PAGESIZE):
    memory[start] = 1
"""
NUMARUN = [sys.executable, "-m", "numadist.launch.cli", "--quiet", "--numa-nodes", "1"]
HUNGRY_RANK = ["--no-python", sys.executable, "-c", HUNGRY]

bound = subprocess.run([*NUMARUN, *HUNGRY_RANK], capture_output=True, text=True)
spilling = subprocess.run([*NUMARUN, "--mem", "preferred", *HUNGRY_RANK], capture_output=True, text=True)
print(json.dumps({"code": bound.returncode, "stderr": bound.stderr, "preferred_code": spilling.returncode}))
