# guest four_nodes: python
"""Inside a cpuset with the CPUs of both nodes and the memory of node 0 alone, as docker --cpuset-mems=0."""

import json
import os
import subprocess
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
NUMARUN = [sys.executable, "-m", "numadist.launch.cli"]
RANK = (
    "import json, os; from numadist.binding import current_binding as b; "
    "print(json.dumps([int(os.environ['RANK']), b().cpus, b().mem_nodes]))"
)

if not (CGROUP / "cgroup.controllers").exists():
    subprocess.run(["mount", "-t", "cgroup2", "none", str(CGROUP)], check=True)
(CGROUP / "cgroup.subtree_control").write_text("+cpuset")
box = CGROUP / "box"
box.mkdir()
(box / "cpuset.cpus").write_text("1-2")
(box / "cpuset.mems").write_text("0")
(box / "cgroup.procs").write_text(str(os.getpid()))

command = [*NUMARUN, "--prefix", "never", "--no-python", sys.executable, "-c", RANK]
run = subprocess.run(command, capture_output=True, text=True)
outside = subprocess.run([*NUMARUN, "--dry-run", "--cpus", "0"], capture_output=True, text=True)
strict = subprocess.run([*NUMARUN, "--dry-run", "--strict"], capture_output=True, text=True)
result = {
    "ranks": sorted(json.loads(line) for line in run.stdout.splitlines()),
    "code": run.returncode,
    "stderr": run.stderr,
    "outside": outside.stderr,
    "strict": strict.stderr,
}
print(json.dumps(result))
