"""Several machines: two numaruns in network namespaces of their own, joined by a virtual cable."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from numarun_process import NUMARUN, needs_two_cores, run_gloo

pytestmark = [
    pytest.mark.mp,
    pytest.mark.slow,
    needs_two_cores,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and ip"
    ),
]

LIMIT_S = 300  # only a hang reaches it
ADDRESSES = ("10.213.77.1", "10.213.77.2")

SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(x)
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
print("seen", x.item(), *(os.environ[name] for name in names), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines():
    """Names of two network namespaces that reach each other at ADDRESSES over a device named `wire`."""
    names = [f"numarun-{os.getpid()}-{i}" for i in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(machine: str, node_rank: int, script: Path, *options: str) -> subprocess.Popen:
    shared = ["--quiet", "--nproc-per-node", "2", "--nnodes", "2", "--master-addr", ADDRESSES[0], *options]
    command = ["ip", "netns", "exec", machine, *NUMARUN, *shared, "--node-rank", str(node_rank), str(script)]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "wire"}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_job(machines: list[str], script: Path, port: str, *options: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each machine's numarun."""

    def once() -> list[tuple[int, str, str]]:
        jobs = [
            start(machine, node, script, "--master-port", port, *options)
            for node, machine in enumerate(machines)
        ]
        return [(job.returncode, *output) for job in jobs for output in [job.communicate(timeout=LIMIT_S)]]

    def stderr_if_any_failed(ends: list[tuple[int, str, str]]) -> str | None:
        return "".join(stderr for _, _, stderr in ends) if any(code for code, *_ in ends) else None

    return run_gloo(once, stderr_if_any_failed)


def test_two_machines_make_one_job(tmp_path, machines):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ends = run_job(machines, script, "29513")
    assert [code for code, *_ in ends] == [0, 0], ends
    for node, (_, stdout, _) in enumerate(ends):
        ranks = sorted(re.findall(r"^\[r(\d)\] seen (.*)$", stdout, re.M))
        assert ranks == [(str(2 * node + i), f"15.0 {2 * node + i} {i} 2 {node} 2 4") for i in (0, 1)]


TRAINING = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("numa")
gloo = dist.new_group(backend="gloo")
losses = {}
for group in (dist.group.WORLD, gloo):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(64, 16)
    for _ in range(20):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses[group] = loss.item()
ours, theirs = losses.values()
local = dist.new_subgroups(2)[0]
y = torch.tensor([float(dist.get_rank())])
dist.all_reduce(y, group=local)
print("trained", type(dist.group.WORLD).__name__, type(local).__name__, y.item(), ours, theirs, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_ddp_over_two_machines_trains_as_on_gloo(tmp_path, machines):
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    ends = run_job(machines, script, "29514")
    assert [code for code, *_ in ends] == [0, 0], ends
    seen = re.findall(r"^\[r(\d)\] trained (\w+) (\w+) (\S+) (\S+) (\S+)$", ends[0][1] + ends[1][1], re.M)
    assert sorted(rank for rank, *_ in seen) == ["0", "1", "2", "3"], ends
    for rank, whole, local, total, ours, theirs in seen:
        assert (whole, local) == ("MachinesGroup", "ShmGroup"), f"rank {rank}"
        assert float(total) == (1.0 if int(rank) < 2 else 5.0), f"rank {rank}"
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5), f"rank {rank}"
        assert float(ours) < 5, f"rank {rank} did not learn: {ours}"


def said(job: subprocess.Popen, text: str) -> bool:
    """Read its stderr up to the line with the text."""
    return any(text in line for line in job.stderr)


@pytest.mark.parametrize("late", [0, 1])
def test_a_machine_says_whom_it_waits_for(tmp_path, machines, late):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('"gloo"', '"numa"'))
    first = start(machines[1 - late], 1 - late, script, "--master-port", "29515")
    where = f"{ADDRESSES[0]}:29515"
    wanted = (
        f"waiting for machine 0 at {where} (Connection refused)",
        f"waiting for machine 1 of 2: no rank has come to {where}",
    )[late]
    assert said(first, wanted)
    second = start(machines[late], late, script, "--master-port", "29515")
    for job in (first, second):
        output = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, output


def test_several_machines_need_the_address_of_the_first():
    command = [*NUMARUN, "--nnodes", "2", "x.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    wanted = "numarun: error: --nnodes > 1 needs --master-addr, the same on all machines\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_node_rank_must_be_one_of_the_machines():
    command = [*NUMARUN, "--nnodes", "2", "--node-rank", "2", "--master-addr", "h", "x.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (
        2,
        "numarun: error: --node-rank 2 is not one of 0-1 (--nnodes 2)\n",
    )
