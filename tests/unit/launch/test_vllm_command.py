"""`numadist vllm`: how many workers its words ask for, what vLLM is told, what is said of where they are."""

import os
import subprocess
import sys

import pytest

from numadist.errors import NumadistError
from numadist.launch.place import Request, place
from numadist.launch.vllm import Worker, find_workers, num_workers, worker_lines
from numadist.topology.synthetic import synthetic


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("serve model", 1),
        ("serve model -tp 2", 2),
        ("serve model --tensor-parallel-size=4 -pp 2", 8),
        ("serve model --tensor_parallel_size 2 --data-parallel-size=3", 6),
    ],
)
def test_workers_are_the_product_of_the_sizes(words, count):
    assert num_workers(words.split()) == count


@pytest.mark.parametrize("words", ["serve model -tp", "serve model -tp two", "serve model -tp=0"])
def test_a_size_that_is_none_is_refused(words):
    with pytest.raises(NumadistError, match="a number of at least 1"):
        num_workers(words.split())


def run_stand_in(tmp_path, *words, **variables):
    """numadist vllm with a program on PATH that says what it was given."""
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$VLLM_CPU_OMP_THREADS_BIND $NUMADIST_BACKEND $*"\nexit 7\n')
    program.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMADIST_", "VLLM_"))}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
    command = [sys.executable, "-m", "numadist.commands.main", "vllm", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def test_vllm_is_told_where_its_worker_belongs(tmp_path):
    done = run_stand_in(tmp_path, "bench", "latency", "--model", "m")
    cpus, backend, rest = done.stdout.strip().split(maxsplit=2)
    assert (done.returncode, backend, rest) == (7, "numa", "bench latency --model m"), done.stderr
    assert cpus
    assert f"cpus {cpus} " in done.stderr
    assert "1 worker of vLLM" in done.stderr


def test_what_the_user_set_is_kept(tmp_path):
    done = run_stand_in(
        tmp_path, "bench", "-tp", "2", VLLM_CPU_OMP_THREADS_BIND="0|0", NUMADIST_BACKEND="numa"
    )
    assert done.stdout.strip() == "0|0 numa bench -tp 2"
    assert "VLLM_CPU_OMP_THREADS_BIND is set" in done.stderr


def test_too_many_workers_are_refused_before_anything_starts(tmp_path):
    done = run_stand_in(tmp_path, "bench", "-tp", "100000")
    assert (done.returncode, done.stdout) == (1, "")
    assert "numadist: error: " in done.stderr


def test_lines_say_what_is_not_as_it_was_asked_for():
    plan = place(synthetic("package:2 node:1 core:2 cpu:1"), Request(per="node", count=2))
    right = Worker("VLLM::Worker_TP0", 11, (0, 1), {0: 2048})
    wrong = Worker("VLLM::Worker_TP1", 12, (1, 3), {0: 1024, 1: 1024})
    lines = worker_lines([right, wrong], plan)
    assert lines[0] == "VLLM::Worker_TP0 (pid 11): threads on cpus 0-1, 2 MiB: node 0 100 %"
    assert lines[1].startswith(
        "warning: VLLM::Worker_TP1 (pid 12): threads on cpus 1,3, 2 MiB: node 0 50 %, node 1 50 %"
    )
    assert lines[1].endswith("cpus 2-3 were asked for; memory on node 1 was asked for")


SLEEPER = "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print('ready', flush=True); input()"


def test_workers_are_found_below_a_process_by_their_names():
    shell = ["bash", "-c", f'exec -a "VLLM::Worker_TP0" {sys.executable} -c "$1"', "bash", SLEEPER]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        (worker,) = find_workers(process.pid, 1)
        process.communicate("\n")
    assert worker.name.startswith("VLLM::Worker_TP0")
    assert worker.cpus == (min(os.sched_getaffinity(0)),)
    assert sum(worker.pages.values()) > 0
