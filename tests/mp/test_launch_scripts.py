"""Scripts written for torchrun, unmodified: numarun gives what torchrun gives."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numarun_process import NUMARUN, needs_two_cores, run_gloo, stderr_if_failed, summary_of

pytestmark = [pytest.mark.mp, needs_two_cores]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT_S = 300  # only a hang reaches it

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


def run(command: list[str], folder: Path) -> str:
    def once() -> subprocess.CompletedProcess:
        shutil.rmtree(folder / "logs", ignore_errors=True)
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)

    # A rank on our backend must not abort, so only a script that is left to gloo is run again.
    on_ours = "numa" in command
    done = once() if on_ours else run_gloo(once, stderr_if_failed)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(options: list[str], folder: Path) -> list[str]:
    """The `result` lines of the ranks under numarun, in rank order."""
    stdout = run([*NUMARUN, "--quiet", "--nproc-per-node", "2", *options], folder)
    return sorted(re.findall(r"result .*", stdout))


def torchrun_results(options: list[str], folder: Path) -> list[str]:
    """The same under torchrun, from its log files: on the terminal it lets two ranks write on one line."""
    run([*TORCHRUN, "--nproc-per-node", "2", "--redirects", "3", "--log-dir", "logs", *options], folder)
    texts = [path.read_text() for path in (folder / "logs").rglob("stdout.log")]
    return sorted(line for text in texts for line in re.findall(r"result .*", text))


@pytest.mark.parametrize(
    ("body", "args"),
    [
        pytest.param(DDP, [], marks=pytest.mark.slow),
        pytest.param(DTENSOR, [], marks=pytest.mark.slow),
        (LOCAL_RANK, ["--name", "x"]),
        (NO_TORCH, ["--nnodes", "3"]),
    ],
    ids=["ddp", "dtensor", "argparse-local-rank", "no-torch"],
)
def test_script_prints_what_it_prints_under_torchrun(tmp_path, body, args):
    (tmp_path / "script.py").write_text(body)
    ours = results(["script.py", *args], tmp_path)
    theirs = torchrun_results(["script.py", *args], tmp_path)
    assert len(ours) == 2
    assert ours == theirs


def test_module_prints_what_it_prints_under_torchrun(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text(NO_TORCH)
    ours = results(["-m", "pkg.mod", "a", "-b"], tmp_path)
    assert ours == torchrun_results(["-m", "pkg.mod", "a", "-b"], tmp_path)


def test_an_exception_under_record_is_in_the_summary(tmp_path):
    (tmp_path / "script.py").write_text(RECORD)
    command = [*NUMARUN, "--quiet", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    summary = summary_of(done.stderr)
    assert done.returncode == 1
    assert "numarun:   RuntimeError: weights are missing" in summary, done.stderr
    assert len(summary) <= 8


WHICH = """
import sys, torch, torch.distributed as dist
dist.init_process_group(*sys.argv[1:])
x = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(x)
sub = dist.new_group([0, 1], backend=dist.get_backend())
kinds = [type(group).__module__ for group in (dist.group.WORLD, sub)]
print("result", dist.get_rank(), *kinds, x.tolist(), dist.get_backend(), flush=True)
dist.barrier()  # Gloo: a rank that leaves while another still connects to it fails that one
dist.destroy_process_group()
"""


@pytest.mark.parametrize("asked", [[], ["gloo"]], ids=["no-backend", "gloo"])
def test_backend_numa_stands_in_for_gloo(tmp_path, asked):
    (tmp_path / "script.py").write_text(WHICH)
    plain = results(["script.py", *asked], tmp_path)
    ours = results(["--backend", "numa", "script.py", *asked], tmp_path)
    assert all("torch.distributed" in text or "torch._C" in text for text in plain), plain
    assert [text.split()[2:4] for text in ours] == [["numadist.comm.shm_group"] * 2] * 2
    # The sums and the name the script sees are the same.
    assert [text.split()[4:] for text in ours] == [text.split()[4:] for text in plain]


@pytest.mark.slow
def test_ddp_script_gives_the_same_losses_on_backend_numa_and_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(DDP)
    ours = results(["--backend", "numa", "script.py"], tmp_path)
    theirs = torchrun_results(["script.py"], tmp_path)
    losses = [[float(word) for text in side for word in text.split()[1:]] for side in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
def test_torchrun_runs_our_backend(tmp_path):
    (tmp_path / "script.py").write_text(WHICH)
    seen = torchrun_results(["script.py", "numa"], tmp_path)
    assert [text.split()[2:4] for text in seen] == [["numadist.comm.shm_group"] * 2] * 2
