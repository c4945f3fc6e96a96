"""The benchmark that compares an empty script's time under numarun with that under torchrun runs as it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from numarun_process import needs_two_cores

pytestmark = [pytest.mark.mp, pytest.mark.slow, needs_two_cores]

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "launch_startup.py"


def test_both_launchers_are_timed(tmp_path):
    out = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, str(BENCHMARK), "--runs", "1", "--json", str(out)], check=True, timeout=600
    )
    rows = {row["system"]: row for row in json.loads(out.read_text())}
    assert sorted(rows) == ["numarun", "torchrun"]
    assert all(row["median_s"] > 0 for row in rows.values())
