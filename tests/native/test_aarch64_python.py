"""The Python part on aarch64: numarun starts two ranks that qemu-user runs, and they share out a small model.

Everything for aarch64 comes from the network: Python from Debian, torch and what it needs from PyPI. PyPI's wheels of
torch for aarch64 want CUDA since 2.11, so this is the last one before, older than what we support.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg-deb")
missing = [tool for tool in TOOLS if shutil.which(tool) is None]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread"]
PYTHON = "python3.11"
DEBIAN = [PYTHON, f"{PYTHON}-minimal", f"lib{PYTHON}-stdlib", f"lib{PYTHON}-minimal", "libc6", "libstdc++6"]
DEBIAN += ["libgcc-s1", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libuuid1"]
PYPI = [
    "torch==2.10.0",
    "numpy",
    "psutil",
    "filelock",
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
]
PYPI += ["jinja2", "markupsafe", "fsspec"]
ENTRY_POINTS = "[torch.backends]\nnumadist = numadist.comm.register:autoload\n"

PROGRAM = """
import torch
import torch.distributed as dist
import numadist

dist.init_process_group("numa")
x = torch.full((100_000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert x.eq(3).all(), x
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).eval()
rows = torch.randn(2, 5, 32)
with torch.no_grad():
    sharded = numadist.shard(model, (rows,))
    torch.testing.assert_close(sharded(rows), model(rows))
whole = sum(p.numel() for p in model.parameters())
assert len(sharded.schema.blocks) == 1 and sum(p.numel() for p in sharded.parameters()) < 0.6 * whole
print("shared out by", dist.get_world_size(), "ranks on", torch._C._get_cpu_capability(), flush=True)
dist.destroy_process_group()
"""

pytestmark = [
    pytest.mark.native,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)} (make test-packages)"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A program that runs Python for aarch64, with torch and this package."""
    folder = tmp_path_factory.mktemp("aarch64-python")
    root, packages = folder / "root", folder / "packages"
    unpack_debian(folder, root)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += [f"--platform=manylinux{name}_aarch64" for name in ("_2_28", "_2_27", "_2_17", "2014")]
    pip += ["--python-version", "3.11", "--target", str(packages)]
    # An index of this machine's own may have torch without CUDA, for x86 alone.
    subprocess.run([*pip, *PYPI], check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
    build_package(packages)
    program = folder / "python"
    words = f"qemu-aarch64 -cpu neoverse-n1 -L {root} -E PYTHONPATH={packages} {root}/usr/bin/{PYTHON}"
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    return program


def unpack_debian(folder: Path, root: Path) -> None:
    """Packages for arm64, from where this Debian has its own."""
    state, debs = folder / "state", folder / "debs"
    for made in (state / "lists" / "partial", folder / "cache" / "archives" / "partial", debs):
        made.mkdir(parents=True)
    (state / "status").touch()
    settings = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::Cache": folder / "cache"}
    settings |= {"Dir::State": state, "Dir::State::status": state / "status"}
    apt = [
        "apt-get",
        "-qq",
        *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")),
    ]
    subprocess.run([*apt, "update"], check=True)
    if subprocess.run([*apt, "download", *DEBIAN], cwd=debs).returncode:
        pytest.skip(f"this Debian has no {PYTHON} for arm64")
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", deb, root], check=True)


def build_package(packages: Path) -> None:
    """This package there, its core built for aarch64, and known to torch."""
    shutil.copytree(
        ROOT / "numadist", packages / "numadist", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    sources = sorted((ROOT / "numadist" / "csrc").rglob("*.cpp"))
    command = [TOOLS[0], *FLAGS, "-shared", f"-I{ROOT / 'numadist' / 'csrc'}", *sources, "-ldl"]
    subprocess.run([*command, "-o", packages / "numadist" / "_core.so"], check=True)
    about = packages / "numadist-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: numadist\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)


def test_two_ranks_on_aarch64_share_out_a_model(python, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    numarun = [sys.executable, "-m", "numadist.launch.cli", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run([*numarun, python, script], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("shared out by 2 ranks") == 2, done.stdout
