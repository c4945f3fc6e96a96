"""examples/prefill.py as a user runs it, on a small model: its table, its exit code, a rank killed in its middle."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from numarun_process import needs_two_cores
from pool import shm_files

pytest.importorskip("transformers", reason="needs the extra `models`")

pytestmark = [pytest.mark.mp, needs_two_cores]

REPO = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "numadist.launch.cli", "--nproc-per-socket", "2", "examples/prefill.py"]
SMALL = ["--model", "gpt2-tiny"]
LIMIT_S = 300  # only a hang reaches it


def test_the_table_is_printed_and_the_answers_are_equal():
    run = subprocess.run(
        [*COMMAND, *SMALL, "--rounds", "2"], cwd=REPO, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = dict(re.findall(r"^(?:\[r0\] )?([a-z][\w /,\[\]-]+?)  +(.+)$", run.stdout, re.M))
    assert rows["next tokens"] == "equal for every prompt"
    assert float(rows["max logit difference"]) < 1e-3
    assert float(rows["largest share of a rank"]) < 0.85
    assert float(rows["ratio unsharded / sharded"]) > 0
    assert rows["pages of the weights by NUMA node"].count("{") == 2


def test_a_rank_killed_in_the_middle_ends_the_run_with_137_and_leaves_nothing():
    shm_before = shm_files()
    run = subprocess.Popen(
        [*COMMAND, *SMALL, "--rounds", "100000"],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = iter(run.stdout.readline, "")
    assert any("blocks sharded over 2 ranks" in line for line in output), "ended before its forwards began"
    pids = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    os.kill(pids[1], signal.SIGKILL)
    rest = "".join(output)
    assert run.wait(timeout=LIMIT_S) == 137, rest
    assert "killed by signal 9" in rest, rest
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert shm_files() <= shm_before
