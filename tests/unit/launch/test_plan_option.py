"""numarun --plan on recorded and made-up plans."""

import json
import subprocess
import sys

import pytest

from numadist.launch.cli import main
from numadist.phases.plan import PhasePlan, PlanPair, RankPlan
from numadist.topology.sysfs import read_machine
from numadist.topology.tree import breadth_first, build_tree, tree_key


@pytest.fixture
def plan_file(tmp_path):
    """write(decode threads, key=...) -> path of a plan of one rank on all cores of this machine."""
    machine = read_machine("/")
    tree = build_tree(machine)
    first_of_core = {core.cpus[0] for core in machine.cores}
    cpus = tuple(cpu for cpu in breadth_first(tree.root) if cpu in first_of_core)

    def write(decode_threads, key=None):
        path = tmp_path / "plan.json"
        ranks = [PhasePlan((RankPlan(cpus, threads),)) for threads in (len(cpus), decode_threads)]
        PlanPair(*ranks, topology_key=key or tree_key(tree)).save(path)
        return str(path), cpus

    return write


@pytest.mark.parametrize("inherited", [None, "1"])
def test_ranks_are_those_of_the_plan(plan_file, capsys, monkeypatch, inherited):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if inherited:
        monkeypatch.setenv("OMP_NUM_THREADS", inherited)
    path, cpus = plan_file(1)
    assert main(["--plan", path, "--dry-run", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (tuple(rank["cpus"]), rank["threads"]) == (cpus, len(cpus))


def test_the_rank_finds_its_plan_and_its_threads_in_its_environment(plan_file, tmp_path):
    path, cpus = plan_file(1)
    script = tmp_path / "script.py"
    script.write_text("import os, json; print(json.dumps(dict(os.environ)))")
    words = ["-m", "numadist.launch.cli", "--quiet", "--prefix", "never", "--plan", path, str(script)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, timeout=300)
    seen = json.loads(done.stdout)
    assert seen["NUMADIST_PLAN"] == path
    if len(cpus) > 1:
        assert seen["OMP_PLACES"] == ",".join(f"{{{cpu}}}" for cpu in cpus)
        assert seen["KMP_HOT_TEAMS_MODE"] == "1"


def test_a_plan_of_another_machine_is_refused(plan_file, capsys):
    path, _ = plan_file(1, key="0" * 32)
    assert main(["--plan", path, "--dry-run"]) == 2
    assert "run numadist tune here" in capsys.readouterr().err


def test_a_plan_and_other_cpus_cannot_go_together(plan_file, capsys):
    path, _ = plan_file(1)
    for words, name in ((["--nproc-per-numa", "2"], "nproc-per-numa"), (["--reserve", "1"], "reserve")):
        assert main(["--plan", path, *words, "--dry-run"]) == 2
        assert f"--plan and --{name} cannot be used together" in capsys.readouterr().err
