"""Emulated machines with several NUMA nodes: one boot runs every check written for that machine.

A check is a script in checks/ whose first lines say where and how it runs, one line a machine:

    # guest two_nodes: numarun --nproc-per-numa 1
    # guest four_nodes: python

It prints one JSON object (each rank prints its own under numarun). A test takes the fixture named as the
machine and reads `two_nodes["check_name"]`. The guest sees this host's files read-only, so interpreter,
packages and repository are the ones the tests run with; everything is slow (import torch: 1-2 minutes).

How slow depends on what else this machine does, so no check has a time limit: a guest runs as long as it gets on.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from progress import STALL_S, ends

REPO = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).resolve().parent / "checks"
BOOT = REPO / "tests" / "tools" / "numa-vm.sh"
NEEDED = ("qemu-system-x86_64", "busybox", "cpio", "modprobe")
HARD_END_S = 2700

MACHINES = {
    # Two nodes, each with two CPUs and 1 GiB.
    "two_nodes": (
        "-smp 4 -m 2048M -object memory-backend-ram,id=m0,size=1G -object memory-backend-ram,id=m1,size=1G "
        "-numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1"
    ),
    # Nodes 0 and 1 as above; 2 has a CPU and no memory, 3 has 512 MiB and no CPU. Node 1 is nearest to node 2.
    "four_nodes": (
        "-smp 5 -m 2560M -object memory-backend-ram,id=m0,size=1G -object memory-backend-ram,id=m1,size=1G "
        "-object memory-backend-ram,id=m3,size=512M "
        "-numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1 "
        "-numa node,nodeid=2,cpus=4 -numa node,nodeid=3,memdev=m3 "
        "-numa dist,src=0,dst=1,val=20 -numa dist,src=0,dst=2,val=20 -numa dist,src=0,dst=3,val=20 "
        "-numa dist,src=1,dst=2,val=12 -numa dist,src=1,dst=3,val=20 -numa dist,src=2,dst=3,val=30"
    ),
}


@dataclass(frozen=True)
class Check:
    """What one check printed. by_rank: the object of each rank; a plain check is rank 0."""

    exit_code: int
    stdout: str
    stderr: str
    by_rank: dict[int, dict] = field(default_factory=dict)

    @property
    def only(self) -> dict:
        assert list(self.by_rank) == [0], (
            f"{len(self.by_rank)} objects printed, not one:\n{self.stdout}{self.stderr}"
        )
        return self.by_rank[0]


@dataclass(frozen=True)
class Guest:
    """The results of all checks of one machine."""

    console: str
    checks: dict[str, Check]

    def __getitem__(self, name: str) -> Check:
        assert name in self.checks, f"check {name} did not run; the guest's console:\n{self.console[-3000:]}"
        return self.checks[name]


@pytest.fixture(scope="session")
def four_nodes(tmp_path_factory) -> Guest:
    return boot("four_nodes", tmp_path_factory.mktemp("four_nodes"))


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory) -> Guest:
    return boot("two_nodes", tmp_path_factory.mktemp("two_nodes"))


def boot(machine: str, share: Path) -> Guest:
    """Boot a machine once, run its checks in it and read what they printed."""
    skip_without_tools()
    commands = {path.stem: command for path in sorted(CHECKS.glob("*.py")) if (command := how(path, machine))}
    (share / "guest.sh").write_text(guest_script(commands))
    arguments = shlex.split(MACHINES[machine]) + hidden_folder_arguments()
    console = share / "console.txt"
    with console.open("w") as file:
        run = subprocess.Popen(
            ["bash", str(BOOT), str(share / "guest.sh"), *arguments],
            env={**os.environ, "T": str(HARD_END_S)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        hung = not ends(run, share)
    said = console.read_text(errors="replace") + (f"\nended: no progress in {STALL_S} s\n" if hung else "")
    return Guest(said, {n: read_check(share, n) for n in commands if (share / f"{n}.rc").exists()})


def skip_without_tools() -> None:
    missing = [
        tool for tool in NEEDED if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    if not list(Path("/boot").glob("vmlinuz-*")):
        missing.append("a kernel in /boot")
    if missing:
        pytest.skip(f"emulated machine: missing {', '.join(missing)}")


def how(path: Path, machine: str) -> str | None:
    """The shell command of a check on this machine; None: it does not run there."""
    found = re.search(rf"^# guest {machine}: (python|numarun)(.*)$", path.read_text(), re.M)
    if not found:
        return None
    module = "" if found[1] == "python" else "-m numadist.launch.cli"
    return f"{shlex.quote(sys.executable)} {module} {found[2]} {shlex.quote(str(path))}"


def hidden_folders() -> list[str]:
    """Folders the guest needs but cannot see, because it has a /tmp of its own."""
    return sorted({str(p) for p in (REPO, sys.prefix, sys.base_prefix) if str(p).startswith("/tmp/")})


def hidden_folder_arguments() -> list[str]:
    words = []
    for index, folder in enumerate(hidden_folders()):
        words += ["-virtfs", f"local,path={folder},mount_tag=hidden{index},security_model=none,readonly=on"]
    return words


def guest_script(commands: dict[str, str]) -> str:
    lines = [
        "busybox ifconfig lo 127.0.0.1 up; busybox hostname localhost",
        "export PYTHONDONTWRITEBYTECODE=1 GLOO_SOCKET_IFNAME=lo HOME=/tmp",
    ]
    for index, folder in enumerate(hidden_folders()):
        options = "trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro"
        lines.append(f"mkdir -p {folder} && mount -t 9p -o {options} hidden{index} {folder}")
    for name, command in commands.items():
        lines.append(
            f"{command} >/tmp/share/{name}.out 2>/tmp/share/{name}.err </dev/null; "
            f"echo $? >/tmp/share/{name}.rc"
        )
    return "\n".join(lines) + "\n"


def read_check(share: Path, name: str) -> Check:
    stdout = (share / f"{name}.out").read_text(errors="replace")
    by_rank = {}
    for line in stdout.splitlines():
        found = re.match(r"(?:\[r(\d+)\] )?(\{.*\})$", line)
        if found:
            by_rank[int(found[1] or 0)] = json.loads(found[2])
    stderr = (share / f"{name}.err").read_text(errors="replace")
    return Check(int((share / f"{name}.rc").read_text()), stdout, stderr, by_rank)
