"""numarun --plan on an OpenMP that keeps its threads (hot teams): a thousand switches make and end none."""

import json
import os

import pytest
from numarun_process import run

from numadist.errors import PlacementError
from numadist.launch.preload import find_library
from numadist.phases.plan import PhasePlan, PlanPair, RankPlan

pytestmark = [pytest.mark.mp, pytest.mark.slow]

SCRIPT = """
import json, os
import torch
from numadist.phases.phase import phase, phase_stats, switch_phase, use_plan
from numadist.phases.plan import PhasePlan, PlanPair, RankPlan

threads = []
for name in ("prefill", "decode"):
    with phase(name):
        threads.append(torch.get_num_threads())

# More threads than this machine may have: a team of one never ends the others.
cpus = (0, 1, 2, 3)
use_plan(PlanPair(PhasePlan((RankPlan(cpus, 4),)), PhasePlan((RankPlan(cpus, 2),))))
torch.manual_seed(0)
x, w = torch.randn(64, 512), torch.randn(512, 512)
with phase("prefill"):
    wanted = x @ w
    ids, before = set(os.listdir("/proc/self/task")), phase_stats()
    for _ in range(500):
        for name in ("decode", "prefill"):
            switch_phase(name)
    after = phase_stats()
    print(json.dumps({
        "plan": threads,
        "runtime": after.runtime,
        "switches": after.switches - before.switches,
        "created": after.threads_created - before.threads_created,
        "ids_changed": len(ids ^ set(os.listdir("/proc/self/task"))),
        "same": torch.equal(x @ w, wanted),
    }))
"""


def test_a_thousand_switches_keep_every_thread(tmp_path):
    try:
        find_library("iomp5", os.environ)
    except PlacementError as error:
        pytest.skip(str(error))
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    plan, script = tmp_path / "plan.json", tmp_path / "switch.py"
    PlanPair(PhasePlan((RankPlan(cpus, 2),)), PhasePlan((RankPlan(cpus, 1),))).save(plan)
    script.write_text(SCRIPT)
    done = run(script, "--preload", "iomp5", "--plan", str(plan))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.removeprefix("[r0] "))
    assert seen.pop("plan") == [2, 1], "threads of the plan's phases"
    assert seen.pop("runtime").startswith(("libiomp5", "libomp"))
    assert seen == {"switches": 1000, "created": 0, "ids_changed": 0, "same": True}
