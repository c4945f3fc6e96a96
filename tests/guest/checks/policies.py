# guest two_nodes: python
"""What each --mem leaves in a rank over both nodes, and in one rank a node, as the rank itself reads it."""

import json
import subprocess
import sys

RANK = (
    "import json; from numadist.binding import current_binding as b; "
    "print(json.dumps([b().policy, b().mem_nodes]))"
)
NUMARUN = [sys.executable, "-m", "numadist.launch.cli", "--quiet", "--prefix", "never"]

seen = {}
for mem in ("bind", "preferred", "interleave", "local", "none"):
    command = [*NUMARUN, "--mem", mem, "--nproc-per-node", "1", "--no-python", sys.executable, "-c", RANK]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    seen[mem] = json.loads(run.stdout)
print(json.dumps(seen))
