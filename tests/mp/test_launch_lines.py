"""Lines of ranks never mix, a prompt is seen, and nothing of a job outlives its launcher."""

import os
import re
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from numarun_process import LIMIT_S, NUMARUN, needs_two_cores, ready_ranks, run, start, wait_for_end

pytestmark = [pytest.mark.mp, needs_two_cores]

TWO = ("--quiet", "--nproc-per-socket", "2")
LINES = 300


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import os, subprocess, sys, time\nrank = os.environ['RANK']\n{body}\n")
    return path


CHATTER = f"""
for i in range({LINES}):
    print(rank * (i * 37 % 9000 + 1), flush=True)
    print(("e" + rank) * (i * 41 % 5000 + 1), file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("target", ["pipe", "file", "apart"])
def test_lines_never_mix_whatever_their_length_and_target(tmp_path, target):
    path = script(tmp_path, CHATTER)
    command = [*NUMARUN, *TWO, str(path)]
    if target == "apart":
        done = run(path, *TWO)
        text = done.stdout + done.stderr
    elif target == "pipe":
        text = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        ).stdout
    else:
        with open(tmp_path / "out", "w") as out:
            subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=True)
        text = (tmp_path / "out").read_text()
    wanted = Counter()
    for rank in "01":
        wanted.update(f"[r{rank}] " + rank * (i * 37 % 9000 + 1) for i in range(LINES))
        wanted.update(f"[r{rank}] " + ("e" + rank) * (i * 41 % 5000 + 1) for i in range(LINES))
    assert Counter(text.splitlines()) == wanted


def test_a_prompt_of_rank_0_is_seen_before_it_is_answered(tmp_path):
    body = (
        "if rank == '0':\n    print('got', input('name? '))\nelse:\n    time.sleep(1)\n    print('meanwhile')"
    )
    process = start(script(tmp_path, body), *TWO, stdin=subprocess.PIPE)
    seen = ""
    while not seen.rstrip("\n").endswith("name? "):
        ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
        assert ready, f"no prompt, only {seen!r}"
        seen += os.read(process.stdout.fileno(), 4096).decode()
    process.stdin.write("joe\n")
    process.stdin.flush()
    rest, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    text = seen + rest
    assert re.search(r"^\[r1\] meanwhile$", text, re.M), text
    assert re.search(r"(name\? |^\[r0\] )got joe$", text, re.M), text


def test_a_killed_launcher_takes_grandchildren_with_it_but_no_daemon(tmp_path):
    body = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], process_group=0)
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
open(f"pids{rank}", "w").write(f"{child.pid} {daemon.pid}")
print("ready", os.getpid(), flush=True)
time.sleep(1000)
"""
    process = start(script(tmp_path, body), *TWO, cwd=tmp_path)
    ranks = ready_ranks(process, 2)
    pids = [(tmp_path / f"pids{rank}").read_text().split() for rank in range(2)]
    process.kill()
    process.wait()
    for child in [*ranks.values(), *(int(child) for child, _ in pids)]:
        assert wait_for_end(child, LIMIT_S), "it outlived the launcher"
    for _, daemon in pids:
        os.kill(int(daemon), signal.SIGKILL)  # it is still there


def test_a_thread_cannot_run_the_launcher_and_is_told(tmp_path):
    body = (
        "import threading\nfrom numadist.launch.cli import main\n"
        "t = threading.Thread(target=lambda: print(main(['--quiet', 'x.py'])))\nt.start()\nt.join()"
    )
    (tmp_path / "x.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", body], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout == "2\n", done.stderr
    assert "numarun runs in the main thread" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("{numarun} --dry-run | head -1 >/dev/null; exit ${{PIPESTATUS[0]}}", {0, 141}),
        ("{numarun} --dry-run > /dev/full", {125}),
        ("ulimit -n 16; {numarun} --nproc-per-socket 2 x.py", {125}),
        ("TMPDIR=$PWD/gone {numarun} --quiet rm.py", {0}),
    ],
    ids=["reader-gone", "disk-full", "few-files", "folder-gone"],
)
def test_trouble_of_the_system_is_one_sentence(tmp_path, command, code):
    (tmp_path / "x.py").write_text("import time; time.sleep(1000)")
    (tmp_path / "rm.py").write_text("import shutil, os; shutil.rmtree(os.environ['TMPDIR'])")
    done = subprocess.run(
        ["bash", "-c", command.format(numarun=" ".join(NUMARUN))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode in code, done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "error:" in line]) == (125 in code)


def test_a_second_run_into_the_same_log_folder_replaces_the_first(tmp_path):
    for word in ("first", "second"):
        assert (
            run(script(tmp_path, f"print('{word}')"), *TWO, "--log-dir", str(tmp_path / "logs")).returncode
            == 0
        )
    assert (tmp_path / "logs" / "r0.out").read_text() == "second\n"
