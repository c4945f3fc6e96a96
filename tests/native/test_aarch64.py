"""The core built for aarch64, its kernels and its groups run there: qemu-user stands in for the CPU.

qemu keeps the order of memory accesses that the host's x86 has, so what depends on aarch64's weaker order is not seen
here; the thread sanitizer of test_native.py judges that by C++'s rules, which are weaker still.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "numadist" / "csrc"
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-pthread", f"-I{CSRC}"]
missing = [tool for tool in (COMPILER, QEMU) if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)} (make test-packages)"),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aarch64")
    sources = sorted(CSRC.rglob("*.cpp"))
    built = [folder / f"{source.stem}.o" for source in sources]
    jobs = [
        subprocess.Popen([COMPILER, *FLAGS, "-c", source, "-o", path])
        for source, path in zip(sources, built, strict=True)
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs), "the core does not build for aarch64"
    return built


# The rounds of test_native.py, fewer.
@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("test_skinny", (), "ok"),
        ("test_skinny_f32", (), "ok"),
        ("test_half", (), "ok"),
        ("test_quantized", (), "neon_dotprod: ok"),
        ("test_attention", (4,), "worst error"),
        ("test_attention_f32", (), "worst error"),
        ("test_collectives", (2, 40, 1), "2 ranks"),
        ("test_collectives", (3, 30, 2), "3 ranks"),
        ("test_messages", (2, 20, 3), "2 ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kernels_and_groups_of_ranks_work(objects, tmp_path, name, arguments, says):
    program = tmp_path / name
    # Static, so that qemu needs no aarch64 libraries.
    subprocess.run([COMPILER, *FLAGS, "-static", HERE / f"{name}.cpp", *objects, "-o", program], check=True)
    done = subprocess.run(
        [QEMU, program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env=dict(os.environ),
    )
    assert done.returncode == 0, f"{name} {arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    assert says in done.stdout
