# guest two_nodes: python
"""The plan numarun makes on the live machine, and the plan inside one node's CPUs."""

import json
import os
import subprocess
import sys

DRY_RUN = [sys.executable, "-m", "numadist.launch.cli", "--dry-run", "--json"]


def plan(*options: str) -> list[dict]:
    return json.loads(
        subprocess.run([*DRY_RUN, *options], capture_output=True, text=True, check=True).stdout
    )["ranks"]


whole = plan()
os.sched_setaffinity(0, {1, 2})
print(json.dumps({"whole": whole, "one_cpu_of_each_node": plan()}))
