"""`numadist compare` on a small model: every variant gives a row, and its answer is checked."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.profiles import QUICK
from numadist.compare.rounds import Case, measure_case
from numadist.compare.variants import VARIANTS
from numadist.compare.worker import Worker
from numadist.errors import NumadistError

pytestmark = pytest.mark.mp


# One of each kind: the others differ from these by a policy or a backend, and every start costs seconds.
KINDS = ["eager", "compile", "inprocess", "ranks", "openvino", "onnxruntime", "ranks-noreduce"]


def compare(folder: Path, model: str, *options: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command on one small shape; rows go to out.json in the folder."""
    command = [
        sys.executable,
        "-m",
        "numadist.commands.main",
        "compare",
        "--model",
        model,
        "--dtype",
        "float32",
        "--quick",
    ]
    command += ["--batch", "2", "--seq", "16", "--json", str(folder / "out.json"), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert run.returncode == status, run.stdout + run.stderr
    return run


@pytest.mark.slow
def test_every_kind_of_variant_gives_a_row(tmp_path):
    for package in ("openvino", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="needs the extra `peers`")
    run = compare(tmp_path, "gpt2-tiny", "--plot", str(tmp_path / "out.png"), "--variants", ",".join(KINDS))
    rows = {row["variant"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    assert list(rows) == KINDS
    for name, row in rows.items():
        assert "failed" not in row, row
        assert len(row["rounds_ms"]) == 5
        assert (row["error"] < 1e-5) == VARIANTS[name].reduce, f"{name}: error {row['error']}"
    assert rows["ranks"]["all_reduce_ms"] > 0
    assert (tmp_path / "out.png").exists()
    assert "geometric mean" in run.stdout


@pytest.mark.slow
def test_a_worker_that_cannot_start_or_run_is_a_clear_error():
    cpus = sorted(os.sched_getaffinity(0))
    job = ModelUnderTest("gpt2-tiny", "float32")
    with pytest.raises(NumadistError, match="ranks did not start"):
        Worker("ranks", job, cpus, numarun=["--no-such-option"])
    worker = Worker("eager", job, cpus)
    try:
        with pytest.raises(NumadistError, match="RuntimeError"):
            worker.forward(-1, 4)
        assert worker.forward(1, 4).last.shape == (1, 512)
    finally:
        worker.close()


@pytest.mark.slow
def test_a_peer_that_does_not_take_the_model_is_left_out_and_that_is_no_failure():
    """ONNX Runtime in bfloat16."""
    cpus, job = sorted(os.sched_getaffinity(0)), ModelUnderTest("gpt2-tiny", "bfloat16")
    with ExitStack() as stack:
        workers = {}
        for name in ("eager", "onnxruntime"):
            workers[name] = Worker(name, job, cpus)
            stack.callback(workers[name].close)
        case = Case("gpt2-tiny", 1, 8)
        measure_case(workers, case, "bfloat16", QUICK, lambda what: None)
    assert [row.variant for row in case.rows] == ["eager"]
    assert (list(case.left_out), case.failed) == (["onnxruntime"], {})
    assert "no bfloat16 kernels" in case.left_out["onnxruntime"]


def tiny(batch: int, seq: int):
    """A model of the caller's, as `--model module:function` names it."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    return layers, {"input": torch.randn(batch, seq, 16)}


@pytest.mark.slow
def test_a_model_of_the_callers_own(tmp_path):
    run = compare(tmp_path, f"{__name__.rpartition('.')[2]}:tiny", "--variants", "ranks")
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["variant"] for row in rows] == ["compile", "ranks"], run.stdout
    assert all(row["error"] < 1e-5 for row in rows)


def test_an_unknown_model_is_named_before_anything_starts(tmp_path):
    run = compare(tmp_path, "gpt5", status=1)
    assert "unknown model 'gpt5'; known: smollm2, gpt2" in run.stderr
