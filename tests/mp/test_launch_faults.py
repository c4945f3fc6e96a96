"""What numarun does when ranks fail and when it is told to stop: exit code, last lines, left-overs."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from numarun_process import LIMIT_S, needs_two_cores, ready_ranks, run, start, summary_of, wait_for_end

pytestmark = [pytest.mark.mp, needs_two_cores]

TWO = ("--quiet", "--nproc-per-socket", "2")
UP = """import os, signal, sys
rank = int(os.environ["RANK"])
def ready(): print("ready", os.getpid(), flush=True)
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(UP + body)
    return path


@pytest.mark.parametrize(
    ("body", "exit_code", "how"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("raise ValueError('boom')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by signal 11 (SIGSEGV)"),
        ("os.abort()", 134, "killed by signal 6 (SIGABRT)"),
    ],
)
def test_exit_code_is_the_failing_ranks_and_the_summary_has_six_lines(tmp_path, body, exit_code, how):
    done = run(script(tmp_path, f"if rank == 1: {body}\nsignal.pause()"), *TWO)
    assert done.returncode == exit_code, done.stderr
    summary = summary_of(done.stderr)
    assert len(summary) == 6, done.stderr
    assert re.fullmatch(rf"numarun: rank 1 \(node \d+, pid \d+\) failed first: {re.escape(how)}", summary[0])
    assert summary[3:] == [
        "numarun: stopped rank 0 (SIGTERM)",
        "numarun: no logs kept; use --log-dir DIR to keep them",
        f"numarun: exit code {exit_code}",
    ]


def test_summary_shows_the_last_line_the_rank_wrote(tmp_path):
    done = run(script(tmp_path, "if rank == 1: raise ValueError('boom')\nsignal.pause()"), *TWO)
    assert summary_of(done.stderr)[1] == "numarun:   its last line on stderr: ValueError: boom"


def test_kill_9_of_a_rank_ends_the_job_and_leaves_nothing(tmp_path):
    body = "ready()\nprint(os.environ['MASTER_PORT'], flush=True)\nsignal.pause()"
    process = start(script(tmp_path, body), *TWO, "--grace", "1000")  # nobody may wait for it
    pids = ready_ranks(process, 2)
    port = int(process.stdout.readline().split("] ")[1])
    os.kill(pids[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert len(summary_of(stderr)) == 6, stderr
    assert "failed first: killed by signal 9 (SIGKILL)" in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_kill_9_of_numarun_takes_the_ranks_with_it(tmp_path):
    process = start(script(tmp_path, "ready()\nsignal.pause()"), *TWO)
    pids = ready_ranks(process, 2)
    process.kill()
    for rank, pid in pids.items():
        assert wait_for_end(pid, LIMIT_S), f"rank {rank} outlives numarun, which was killed"
    process.communicate()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    deaf = "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))"
    process = start(script(tmp_path, f"{deaf}\nready()\nwhile True: signal.pause()"), *TWO, "--grace", "3")
    pids = ready_ranks(process, 2)
    os.kill(pids[1], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert stdout == "[r0] no\n", "SIGTERM came first"
    assert summary_of(stderr)[3] == "numarun: stopped rank 0 (SIGKILL)"


def test_a_grandchild_that_keeps_the_pipe_open_is_not_waited_for_and_does_not_survive(tmp_path):
    body = "child = os.fork()\nif child == 0: signal.pause()\nprint(child, flush=True)\nsys.exit(4 * rank)"
    done = run(script(tmp_path, body), *TWO, "--grace", "1")
    assert done.returncode == 4
    numbers = [int(line.split("] ")[1]) for line in done.stdout.splitlines()]
    assert numbers, "rank 1 told its child's number before it failed"
    for pid in numbers:
        assert wait_for_end(pid, LIMIT_S), f"process {pid} survived numarun"


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_stop_signal_reaches_all_ranks_and_is_the_exit_code(tmp_path, number, exit_code):
    body = "\n".join(
        [
            "def heard(number, frame):",
            "    print('heard', number, flush=True)",
            "    sys.exit(0)",
            f"signal.signal({int(number)}, heard)",
            "ready()",
            "signal.pause()",
        ]
    )
    process = start(script(tmp_path, body), *TWO)
    ready_ranks(process, 2)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == exit_code, stderr
    assert sorted(stdout.splitlines()) == [f"[r0] heard {int(number)}", f"[r1] heard {int(number)}"]
    assert stderr == "", "a job that was told to stop has not failed"


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path):
    deaf = "signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))"
    body = f"{deaf}\nready()\nwhile True: signal.pause()"
    process = start(script(tmp_path, body), *TWO, "--grace", "1000")
    ready_ranks(process, 2)
    process.send_signal(signal.SIGINT)
    assert {process.stdout.readline(), process.stdout.readline()} == {"[r0] no\n", "[r1] no\n"}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130


def test_usr1_is_forwarded_and_the_job_goes_on(tmp_path):
    body = "\n".join(
        [
            "seen = []",
            "signal.signal(signal.SIGUSR1, lambda *_: seen.append('usr1'))",
            "ready()",
            "while not seen: signal.pause()",
            "print(*seen)",
        ]
    )
    process = start(script(tmp_path, body), *TWO)
    ready_ranks(process, 2)
    process.send_signal(signal.SIGUSR1)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == ["[r0] usr1", "[r1] usr1"]


def test_an_ignored_hangup_stays_ignored(tmp_path):
    """nohup numarun ...: the ranks must not be stopped by a terminal that closes."""
    body = "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\nready()\nsignal.pause()"
    process = start(
        script(tmp_path, body), *TWO, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    ready_ranks(process, 2)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143


def test_a_reader_that_closes_stdout_ends_the_job_like_sigpipe(tmp_path):
    process = start(
        script(tmp_path, "ready()\nwhile True: print('y' * 100)"), *TWO, stderr=subprocess.DEVNULL
    )
    ready_ranks(process, 2)
    process.stdout.close()
    assert process.wait(timeout=LIMIT_S) == 141


def test_a_full_pipe_does_not_keep_numarun_from_stopping(tmp_path):
    """Nobody reads: numarun must still answer SIGTERM, and give up on the output after the grace."""
    body = "ready()\nwhile True: os.write(1, b'y' * 65535 + b'\\n')"
    process = start(script(tmp_path, body), *TWO, "--grace", "1")
    pids = ready_ranks(process, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT_S) == 143
    assert all(wait_for_end(pid, 0) for pid in pids.values())
    process.stdout.close()
    process.stderr.close()


def test_a_failed_job_restarts_as_often_as_asked(tmp_path):
    count = "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    body = f"{count}\nif count < 2: sys.exit(7)\nprint('done', count)"
    done = run(script(tmp_path, body), *TWO, "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    assert "numarun: restarting all ranks (2 of 2)" in done.stderr
    assert {"[r0] done 2", "[r1] done 2"} <= set(done.stdout.splitlines())


def test_the_exception_that_record_wrote_is_in_the_summary(tmp_path):
    body = "\n".join(
        [
            "import json",
            "stack = 'Traceback:\\n  File x.py, line 3\\nRuntimeError: bad shape'",
            "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as f:",
            "    json.dump({'message': {'message': 'bad shape', 'extraInfo': {'py_callstack': stack}}}, f)",
            "sys.exit(1)",
        ]
    )
    done = run(script(tmp_path, f"if rank == 0: signal.pause()\n{body}"), *TWO)
    summary = summary_of(done.stderr)
    assert summary[3] == "numarun:   RuntimeError: bad shape", summary
    assert len(summary) == 8
