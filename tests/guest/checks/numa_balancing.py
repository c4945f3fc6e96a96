# guest four_nodes: python
"""With automatic NUMA balancing on, ranks without a BIND policy get a warning, bound ranks none."""

import json
import subprocess
import sys
from pathlib import Path

Path("/proc/sys/kernel/numa_balancing").write_text("1")
seen = {}
for mem in ("bind", "local"):
    command = [sys.executable, "-m", "numadist.launch.cli", "--dry-run", "--json", "--mem", mem]
    plan = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    seen[mem] = [text for text in plan["warnings"] if "numa_balancing" in text]
Path("/proc/sys/kernel/numa_balancing").write_text("0")
print(json.dumps(seen))
