"""vLLM on CPUs, unmodified: the same tokens over numa as over gloo and as in one process."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import pytest
from clients import LIMIT_S, NUMARUN, PROGRAMS, Failed, environment, result_of

pytestmark = [pytest.mark.mp, pytest.mark.slow]
pytest.importorskip("vllm")

# One GiB for keys and values; one CPU a worker. As on a machine with AVX2: with AVX-512 vLLM has a sum of its own. What
# it compiled for another instruction set must not be found.
CACHE = tempfile.mkdtemp(prefix="vllm-cache-")
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
    "VLLM_CACHE_ROOT": f"{CACHE}/vllm",
    "PYTHONPATH": f"{PROGRAMS / 'as_avx2'}:{PROGRAMS}:{os.environ.get('PYTHONPATH', '')}",
}
OFFLINE = str(PROGRAMS / "vllm_offline.py")
PROMPT = [1, 5, 9, 11, 3]  # the first of vllm_offline.py
SERVE = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(PROGRAMS / "random_llama.py"), str(folder)], check=True)
    return str(folder)


@pytest.fixture(scope="module")
def tokens(model, tmp_path_factory):
    """What one process says."""
    folder = tmp_path_factory.mktemp("alone")
    variables = CPU | {"VLLM_CPU_OMP_THREADS_BIND": "0,1"}
    found = result_of((sys.executable, OFFLINE, model, "{}"), "gloo", folder, **variables)
    assert len({tuple(row) for row in found}) == 4
    return found


def on_both(command, tmp_path, **variables):
    """What vLLM says over (gloo, numa); skips where it fails over gloo."""
    try:
        theirs = result_of(command, "gloo", tmp_path / "gloo", **variables)
    except Failed as failed:
        pytest.skip(f"vLLM fails over gloo too: {failed.reason}")
    return theirs, result_of(command, "numa", tmp_path / "numa", **variables)


@pytest.mark.parametrize("how", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_workers_say_what_one_says(model, tokens, tmp_path, how):
    command = (sys.executable, OFFLINE, model, json.dumps({how: 2}))
    assert on_both(command, tmp_path, **CPU) == (tokens, tokens)


def test_numarun_starts_the_workers(model, tokens, tmp_path):
    """vLLM's external_launcher: every rank of numarun is a worker, bound by numarun."""
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    command = (*NUMARUN, OFFLINE, model, json.dumps(arguments))
    variables = CPU | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert on_both(command, tmp_path, **variables) == (tokens, tokens)


class Server:
    """`numadist vllm serve MODEL` and what it writes."""

    def __init__(self, model, folder, *words):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model, self.log = model, Path(folder) / "log"
        env = environment("numa", folder, **CPU)
        del env["VLLM_CPU_OMP_THREADS_BIND"]
        command = [sys.executable, "-m", "numadist.commands.main", "vllm", "serve", model, *SERVE, *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=log, stderr=log, env=env, start_new_session=True
            )

    def wait_for_line(self, pattern):
        """The first line of the log that matches, once it is there."""
        with self.log.open() as log:
            line = ""
            while not (line.endswith("\n") and re.search(pattern, line)):
                if line.endswith("\n"):
                    line = ""
                line += log.readline()
                if not line and self.process.poll() is not None:
                    raise Failed(self.log.read_text()[-6000:])
                if not line:
                    select.select([], [], [], 0.1)
            return line

    def complete(self, num_tokens):
        body = {
            "model": self.model,
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def processes(self):
        """Pids of its session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    def stop(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def serve(model, tmp_path):
    started = []

    def start(*words):
        started.append(Server(model, tmp_path, *words))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def test_one_command_serves_and_a_killed_worker_ends_it(serve, tokens, tmp_path):
    before = set(os.listdir("/dev/shm"))
    server = serve("-tp", "2")
    placed = [server.wait_for_line(rf"VLLM::Worker_TP{i} \(pid").strip() for i in range(2)]
    pids = [int(re.search(r"pid (\d+)", line)[1]) for line in placed]
    assert not [line for line in placed if "warning" in line]
    assert server.complete(12) == tokens[0]

    # While it works on a long answer, so that the other worker waits for the one that is killed.
    def ask():
        with contextlib.suppress(OSError, ValueError):
            server.complete(240)

    asking = threading.Thread(target=ask)
    asking.start()
    cpu_time = Path(f"/proc/{pids[0]}/stat")
    begin = cpu_time.read_text().split()[13]
    while cpu_time.read_text().split()[13] == begin:
        select.select([], [], [], 0.01)
    os.kill(pids[1], signal.SIGKILL)
    asking.join()
    server.process.wait(LIMIT_S)  # vLLM itself ends with 0
    for pid in server.processes():
        with contextlib.suppress(ProcessLookupError):
            assert select.select([os.pidfd_open(pid)], [], [], LIMIT_S)[0], f"process {pid} is left"
    assert set(os.listdir("/dev/shm")) <= before
    # vLLM's tensor-parallel sums are ours, and its log has our message.
    assert re.search(r"PeerLost: .*all_reduce\(SUM.*: rank 1 \(pid \d+\) is gone", server.log.read_text())


@pytest.mark.parametrize("words", [("-dp", "2")], ids=["data-parallel"])
def test_two_engines_serve(serve, tokens, words):
    server = serve(*words)
    server.wait_for_line("Application startup complete")
    assert [server.complete(12) for _ in range(4)] == [tokens[0]] * 4
