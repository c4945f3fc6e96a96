"""numarun where memory-policy calls are refused, as in a container without CAP_SYS_NICE; a small /dev/shm."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numarun_process import LIMIT_S, NUMARUN, needs_two_cores

pytestmark = [pytest.mark.mp, needs_two_cores]

SECCOMP = Path(__file__).resolve().parents[1] / "tools" / "seccomp_eperm.py"
REFUSED = "set_mempolicy,mbind,get_mempolicy"

WARNING = (
    "numarun: warning: set_mempolicy: Operation not permitted "
    "(container without CAP_SYS_NICE or a seccomp filter); CPUs are pinned, "
    "memory will be local by first touch but may spill. docker: --cap-add SYS_NICE; silence: --mem local"
)


def run_refused(script: Path, *options: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        str(SECCOMP),
        REFUSED,
        *NUMARUN,
        "--quiet",
        "--nproc-per-socket",
        "2",
        *options,
    ]
    return subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import os; print(sorted(os.sched_getaffinity(0)))")
    return path


def test_a_refused_policy_warns_once_and_cpus_are_pinned(script):
    done = run_refused(script)
    assert done.returncode == 0
    assert done.stderr == WARNING + "\n"
    pinned = re.findall(r"^\[r\d\] \[(.*)\]$", done.stdout, re.M)
    cpus = [int(cpu) for text in pinned for cpu in text.split(", ")]
    assert len(pinned) == 2
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


def test_mem_local_silences_the_warning(script):
    done = run_refused(script, "--mem", "local")
    assert (done.returncode, done.stderr) == (0, "")


def test_strict_makes_a_refused_policy_fatal(script):
    done = run_refused(script, "--strict")
    assert done.returncode == 125
    assert done.stdout == "", "no rank may have started"
    assert re.fullmatch(
        r"numarun: error: set_mempolicy\(MPOL_BIND, node \d+\): Operation not permitted "
        r"\(container without CAP_SYS_NICE or a seccomp filter\); "
        r"docker: --cap-add SYS_NICE; silence: --mem local\n",
        done.stderr,
    )


def test_topo_and_info_still_work():
    refused = [sys.executable, str(SECCOMP), REFUSED, sys.executable, "-m", "numadist.commands.main"]
    assert subprocess.run([*refused, "topo"], capture_output=True, text=True, timeout=LIMIT_S).returncode == 0
    info = subprocess.run([*refused, "info"], capture_output=True, text=True, timeout=LIMIT_S)
    assert "memory policy unknown (get_mempolicy is refused)" in info.stdout, info.stdout + info.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_small_dev_shm_is_told_before_the_run():
    mounted = 'mount -t tmpfs -o size=1m small /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mounted, "sh", *NUMARUN, "--nproc-per-socket", "2", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if "must be superuser" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"mount is refused here: {done.stderr.strip()}")
    assert done.stderr == (
        "numarun: warning: /dev/shm has 1 MiB free, collectives ask for 10 MiB; "
        "docker: --shm-size=1g (memfd will be used)\n"
    )
