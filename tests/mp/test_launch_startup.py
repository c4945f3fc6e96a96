"""An empty script under numarun and under torchrun, in turn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mp

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "launch_startup.py"


def test_numarun_takes_at_most_a_tenth_of_torchruns_time(tmp_path):
    out = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, str(BENCHMARK), "--runs", "5", "--json", str(out)], check=True, timeout=120
    )
    median_s = {row["system"]: row["median_s"] for row in json.loads(out.read_text())}
    assert median_s["numarun"] <= median_s["torchrun"] / 10, median_s
