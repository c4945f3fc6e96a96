# guest four_nodes: python
"""CPU 3 goes offline: node 1 is planned without it, and naming it is an error."""

import json
import subprocess
import sys
from pathlib import Path

NUMARUN = [sys.executable, "-m", "numadist.launch.cli", "--dry-run"]
ONLINE = Path("/sys/devices/system/cpu/cpu3/online")

ONLINE.write_text("0")
try:
    plan = json.loads(subprocess.run([*NUMARUN, "--json"], capture_output=True, text=True, check=True).stdout)
    named = subprocess.run([*NUMARUN, "--cpus", "3"], capture_output=True, text=True)
finally:
    ONLINE.write_text("1")
print(
    json.dumps({"cpus": [r["cpus"] for r in plan["ranks"]], "error": named.stderr, "code": named.returncode})
)
