"""Scripts written for torchrun, unmodified: numarun gives what torchrun gives."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from numarun_process import NUMARUN, summary_of

pytestmark = pytest.mark.mp

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT_S = 120

DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
print("result", dist.get_rank(), loss.item(), model.module.weight.sum().item())
dist.destroy_process_group()
"""

DTENSOR = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(model, mesh, plan)
out = model(torch.ones(3, 8))
print("result", dist.get_rank(), out.sum().item())
dist.destroy_process_group()
"""

LOCAL_RANK = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
parser.add_argument("--name")
args = parser.parse_args()
print("result", args.local_rank, args.name)
"""

NO_TORCH = """
import os, sys
print("result", os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:], "torch" in sys.modules)
"""

RECORD = """
import os
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise RuntimeError("weights are missing")
main()
"""


def results(command: list[str], folder: Path) -> list[str]:
    """What the ranks printed, in rank order."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    # torchrun lets two ranks write on one line.
    return sorted(text.strip() for text in re.findall(r"result (?:(?!result).)*", done.stdout))


@pytest.mark.parametrize(
    ("body", "args"),
    [(DDP, []), (DTENSOR, []), (LOCAL_RANK, ["--name", "x"]), (NO_TORCH, ["--nnodes", "3"])],
    ids=["ddp", "dtensor", "argparse-local-rank", "no-torch"],
)
def test_script_prints_what_it_prints_under_torchrun(tmp_path, body, args):
    (tmp_path / "script.py").write_text(body)
    ours = results([*NUMARUN, "--quiet", "--nproc-per-node", "2", "script.py", *args], tmp_path)
    theirs = results([*TORCHRUN, "--nproc-per-node", "2", "script.py", *args], tmp_path)
    assert len(ours) == 2
    assert ours == theirs


def test_module_prints_what_it_prints_under_torchrun(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text(NO_TORCH)
    ours = results([*NUMARUN, "--quiet", "--nproc-per-node", "2", "-m", "pkg.mod", "a", "-b"], tmp_path)
    assert ours == results([*TORCHRUN, "--nproc-per-node", "2", "-m", "pkg.mod", "a", "-b"], tmp_path)


def test_an_exception_under_record_is_in_the_summary(tmp_path):
    (tmp_path / "script.py").write_text(RECORD)
    command = [*NUMARUN, "--quiet", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    summary = summary_of(done.stderr)
    assert done.returncode == 1
    assert "numarun:   RuntimeError: weights are missing" in summary, done.stderr
    assert len(summary) <= 8
