"""`numadist compare` on a small model: every variant gives a row, and its answer is checked."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist.compare.variants import VARIANTS
from numadist.compare.worker import Worker
from numadist.errors import NumadistError

pytestmark = pytest.mark.mp


# One of each kind: the others differ from these by a policy or a backend, and every start costs seconds.
KINDS = ["eager", "compile", "compile+single-node", "inprocess", "ranks", "ranks-noreduce"]


def test_every_kind_of_variant_gives_a_row(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "numadist.cli", "compare", "--model", "gpt2-tiny", "--dtype", "float32"]
    command += [
        "--batch",
        "2",
        "--seq",
        "16",
        "--quick",
        "--json",
        str(out),
        "--plot",
        str(tmp_path / "out.png"),
    ]
    command += ["--variants", *KINDS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {row["variant"]: row for row in json.loads(out.read_text())}
    assert list(rows) == KINDS
    for name, row in rows.items():
        assert "failed" not in row, row
        assert len(row["rounds_ms"]) == 5
        assert (row["error"] < 1e-5) == VARIANTS[name].reduce, f"{name}: error {row['error']}"
    assert rows["ranks"]["all_reduce_ms"] > 0
    assert (tmp_path / "out.png").exists()
    assert "geometric mean" in run.stdout


def test_a_worker_that_cannot_start_or_run_is_a_clear_error():
    cpus = sorted(os.sched_getaffinity(0))
    with pytest.raises(NumadistError, match="eager ended with exit code 1"):
        Worker("eager", "no-such-model", "float32", cpus)
    worker = Worker("eager", "gpt2-tiny", "float32", cpus)
    try:
        import numpy as np

        with pytest.raises(NumadistError, match="IndexError"):
            worker.forward(np.full((1, 4), 10**6))
        assert worker.forward(np.ones((1, 4), dtype=np.int64)).logits.shape == (1, 512)
    finally:
        worker.close()
