# guest four_nodes: python
"""What the kernel and numarun do with a node without memory, one without CPUs, and what is not there."""

import json
import os
import subprocess
import sys

from numadist.binding import bind_memory, current_binding
from numadist.errors import BindError
from numadist.launch.place import RankPlacement
from numadist.launch.spawn import Start, await_exec, spawn

NUMARUN = [sys.executable, "-m", "numadist.launch.cli"]


def dry_run(*options: str) -> dict:
    done = subprocess.run(
        [*NUMARUN, "--dry-run", "--json", *options], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def error(*options: str) -> str:
    return subprocess.run([*NUMARUN, "--dry-run", *options], capture_output=True, text=True).stderr.strip()


def kept(*nodes: int) -> list[int] | str:
    """What is left of a BIND policy; the text of the error where there is one."""
    try:
        return list(bind_memory("bind", nodes))
    except BindError as refused:
        return str(refused)


def spawn_warnings(*nodes: int) -> list[str]:
    """What numarun says when the kernel narrows the memory nodes of a rank."""
    started = spawn(Start(RankPlacement(0, (0,), nodes, "bind", 1, 0, (0,)), ["true"], dict(os.environ)))
    await_exec(started)
    os.waitpid(started.pid, 0)
    return started.warnings


plan = dry_run()
result = {
    "plan": [[r["numa_nodes"], r["cpus"], r["mem_nodes"]] for r in plan["ranks"]],
    "plan_warnings": plan["warnings"],
    "node_3": error("--numa-nodes", "3"),
    "bind_2": kept(2),
    "bind_7": kept(7),
    "bind_0_2": kept(0, 2),
    "preferred_0_1": list(bind_memory("preferred", [0, 1])),
    "policy_now": current_binding().policy,
    "spawn_0_2": spawn_warnings(0, 2),
}
print(json.dumps(result))
