"""The Python part on aarch64: its wheel, kernels, two ranks of a small model and generation, run by qemu-user.

Everything for aarch64 comes from the network: Python from Debian, torch and what it needs from PyPI. PyPI's wheels of
torch for aarch64 want CUDA since 2.11, so this is the last one before, older than what we support.
"""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg-deb")
missing = [tool for tool in TOOLS if shutil.which(tool) is None]
PYTHON = "python3.11"
DEBIAN = [PYTHON, f"{PYTHON}-minimal", f"lib{PYTHON}-stdlib", f"lib{PYTHON}-minimal", "libc6", "libstdc++6"]
DEBIAN += ["libgcc-s1", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libuuid1"]
TORCH = "2.10.0"
PLATFORM = "manylinux_2_28_aarch64"
# These need no compiler, which torch.compile does, start no other Python and bind no memory, which qemu-user cannot.
UNIT_TESTS = ["kernels", "topology", "weights/test_gguf_blocks.py", "weights/test_packed_integers.py"]

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

dist.all_gather_single = dist.all_gather_into_tensor  # its name before torch 2.13
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, **sizes)).eval()
prompts = [[5, 3, 8], [1, 2, 3]]
generator = numadist.Generator(model, max_batch_size=2, max_length=16, compile=False)
tokens = generator.generate(prompts, max_new_tokens=8, eos_token_id=())
asked = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
wanted = model.generate(torch.tensor(prompts), **asked)
assert tokens == wanted.tolist(), (tokens, wanted)
print("generated", flush=True)
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
    install(
        packages, f"torch=={TORCH}", *needed_by("torch", "transformers", "pytest", "numpy", "psutil", "gguf")
    )
    install(packages, build_wheel(folder))
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


def install(packages: Path, *names: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += [f"--platform=manylinux{name}_aarch64" for name in ("_2_28", "_2_27", "_2_17", "2014")]
    pip += ["--python-version", "3.11", "--target", packages, *names]
    # An index of this machine's own may have torch without CUDA, for x86 alone.
    subprocess.run(pip, check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})


def needed_by(*names: str) -> list[str]:
    """These and what they need, but torch, each in the version that is installed here."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = metadata.version(name)
        for line in metadata.requires(name) or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": "", "platform_machine": "aarch64"}):
                waiting.append(need.name)
    del found["torch"]
    return [f"{name}=={version}" for name, version in found.items()]


def build_wheel(folder: Path) -> Path:
    """This package for aarch64, as a cross compiler makes it."""
    source = folder / "source"
    shutil.copytree(
        ROOT / "numadist", source / "numadist", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    cross = {
        "CC": TOOLS[0],
        "CXX": TOOLS[0],
        "LDSHARED": f"{TOOLS[0]} -shared",
        "LDCXXSHARED": f"{TOOLS[0]} -shared",
    }
    words = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--plat-name", PLATFORM]
    subprocess.run(words, cwd=source, check=True, env={**os.environ, **cross})
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def test_two_ranks_on_aarch64_share_out_a_model(python, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    numarun = [sys.executable, "-m", "numadist.launch.cli", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run([*numarun, python, script], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("shared out by 2 ranks") == 2, done.stdout
    assert done.stdout.count("generated") == 2, done.stdout


def test_unit_tests_pass_on_aarch64(python, tmp_path):
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    words = [python, "-m", "pytest", "-q", *(Path("tests", "unit", name) for name in UNIT_TESTS)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=10800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
