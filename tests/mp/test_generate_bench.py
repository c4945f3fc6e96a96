"""`numadist bench serve` as a user runs it, on a small model."""

import json
import subprocess
import sys

import pytest
from numarun_process import needs_two_cores

pytest.importorskip("transformers", reason="needs the extra `models`")
pytest.importorskip("matplotlib", reason="needs the extra `plot`")

pytestmark = pytest.mark.mp

BENCH = [sys.executable, "-m", "numadist.commands.main", "bench", "serve"]
SMALL = [
    "--model",
    "gpt2-tiny",
    "--num-requests",
    "6",
    "--rate",
    "40",
    "--max-length",
    "200",
]


def run(*options):
    return subprocess.run([*BENCH, *options], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@needs_two_cores
def test_a_sweep_over_two_ranks_gives_a_row_for_every_policy(tmp_path):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    files = ["--json", str(out), "--plot", str(picture)]
    done = run("--synthetic", *SMALL, "--prompt-median", "30", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["setting"]["ranks"] == 2
    assert [row["policy"] for row in found["rows"]] == ["prefill-first", "decode-first", "chunked"]
    for row in found["rows"]:
        assert row["completed"] == 6
        assert 0 <= row["request_goodput"] <= row["request_throughput"]
        assert row["p50_ttft_ms"] <= row["p99_ttft_ms"] <= row["p99_e2el_ms"]
    assert "rate 40: most goodput with" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_synthetic_it_says_what_is_missing():
    done = run()
    assert done.returncode == 1
    assert "say --synthetic" in done.stderr
