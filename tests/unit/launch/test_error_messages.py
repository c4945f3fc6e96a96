"""Every message of the launcher's table, word for word, with its exit code."""

import os
import sys

import pytest
from handmade import write_machine

from numadist.launch.cli import main
from numadist.launch.place import RankPlacement
from numadist.launch.preflight import segment_bytes
from numadist.launch.spawn import Start, await_exec, spawn

SOCKETS = {
    # Two sockets of ten cores with two threads each; the second socket is node 1.
    "cores": [[c, c + 20] for c in range(20)],
    "packages": [[*range(10), *range(20, 30)], [*range(10, 20), *range(30, 40)]],
    "nodes": {0: [*range(10), *range(20, 30)], 1: [*range(10, 20), *range(30, 40)]},
}
POWER = {
    "cores": [[0], [1], [8], [9]],
    "packages": [[0, 1], [8, 9]],
    "nodes": {0: [0, 1], 8: [8, 9], **{n: [] for n in range(250, 256)}},
}


@pytest.fixture
def error(capsys, tmp_path):
    """Function: (options, machine) -> (exit code, text after `numarun: error: `); nothing else is printed."""

    def run(*options: str, **machine) -> tuple[int, str]:
        root = []
        if machine:
            root = ["--dry-run", "--sysfs", str(write_machine(tmp_path / "root", **machine))]
        code = main([*root, *options])
        out = capsys.readouterr()
        assert out.out == ""
        assert out.err.startswith("numarun: error: "), out.err
        return code, out.err.removeprefix("numarun: error: ").rstrip("\n")

    return run


def test_no_script(error):
    assert error() == (2, "no script given (numarun [options] script.py [args]; see --help)")


def test_script_missing(error):
    assert error("x.py") == (127, "cannot open 'x.py': No such file or directory")


@pytest.mark.parametrize("count", ["0", "-1", "abc", "1.5", ""])
@pytest.mark.parametrize("option", ["--nproc-per-socket", "--nproc-per-numa", "--nproc-per-node"])
def test_count_is_a_positive_integer(error, option, count):
    assert error(option, count, "x.py") == (2, f"{option} must be an integer >= 1, got {count!r}")


def test_two_rank_options(error):
    wanted = "--nproc-per-socket and --nproc-per-node cannot be used together"
    assert error("--nproc-per-node", "2", "--nproc-per-socket", "1", "x.py") == (2, wanted)


def test_too_many_ranks(error):
    wanted = "--nproc-per-socket 16 needs 16 cores on socket 1, which has 10 allowed cores"
    hint = " (use --smt to count threads)"
    options = ["--nproc-per-socket", "16", "--sockets", "1"]
    assert error(*options, **SOCKETS) == (2, wanted + hint)
    # The cores' second threads are not allowed: counting threads would not help.
    assert error(*options, "--allowed-cpus", "0-19", **SOCKETS) == (2, wanted)


def test_too_many_ranks_even_for_threads(error):
    wanted = "--nproc-per-numa 21 needs 21 threads on NUMA node 0, which has 20 allowed threads"
    assert error("--nproc-per-numa", "21", "--smt", **SOCKETS) == (2, wanted)


def test_node_not_there(error):
    wanted = "--numa-nodes 3: no such NUMA node; online nodes are 0,8,250-255"
    assert error("--numa-nodes", "3", **POWER) == (2, wanted)


def test_node_without_cpus(error):
    wanted = "--numa-nodes 252: node has memory but no CPUs; nodes with CPUs are 0,8"
    assert error("--numa-nodes", "252", **POWER) == (2, wanted)


def test_node_outside_the_cpuset(error):
    machine = {
        "cores": [[c] for c in range(32)],
        "packages": [range(32)],
        "nodes": {0: range(16), 1: range(16, 32)},
    }
    wanted = (
        "--numa-nodes 1: none of its CPUs 16-31 is allowed here "
        "(allowed: 0-15, from the process's cpuset/affinity)"
    )
    assert error("--numa-nodes", "1", "--allowed-cpus", "0-15", **machine) == (2, wanted)


def test_bad_cpu_list(error):
    wanted = "--cpus '0-3|x': 'x' is not a CPU list (example: 0-3,8|4-7,9)"
    assert error("--cpus", "0-3|x", "x.py") == (2, wanted)


CPUS = {"cores": [[c] for c in range(48)], "packages": [range(48)], "nodes": {0: range(48)}}


@pytest.mark.parametrize(
    ("cpu", "wanted"),
    [
        (40, "--cpus: CPU 40 is offline"),
        (400, "--cpus: CPU 400 does not exist"),
        (41, "--cpus: CPU 41 is not in the allowed set 0-15"),
    ],
)
def test_cpu_that_cannot_be_used(error, cpu, wanted):
    machine = {**CPUS, "online": [c for c in range(48) if c != 40]}
    assert error("--cpus", str(cpu), "--allowed-cpus", "0-15", **machine) == (2, wanted)


def test_list_count_differs(error):
    wanted = "--cpus names 3 ranks but --nproc-per-node is 2"
    assert error("--cpus", "0|1|2", "--nproc-per-node", "2", "x.py") == (2, wanted)


def test_same_cpu_twice(error):
    assert error("--cpus", "0,5|5,6", **CPUS) == (2, "--cpus: CPU 5 is given to ranks 0 and 1")


def test_memory_node_not_allowed_is_an_error_when_strict(error):
    wanted = (
        "rank 1: memory node 1 is not in Mems_allowed 0 (cpuset.mems); "
        "start the container with --cpuset-mems=0,1 or use --mem none"
    )
    assert error("--strict", "--allowed-cpus", "0-39", "--allowed-mems", "0", **SOCKETS) == (2, wanted)


def test_not_linux(error, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Darwin", "", "", "", "")))
    assert error("x.py") == (2, "numarun needs Linux (found Darwin)")


@pytest.mark.parametrize(
    "options", [("--rdzv-backend", "etcd"), ("--nnodes", "1:4"), ("--rdzv_backend=c10d", "--nnodes=2")]
)
def test_elastic_rendezvous(error, options):
    wanted = "numarun has no elastic rendezvous; use --nnodes/--node-rank/--master-addr, or torchrun"
    assert error(*options, "x.py") == (2, wanted)


def test_unknown_option_names_the_nearest(error):
    assert error("--nproc-per-nod", "2", "x.py") == (
        2,
        "unknown option --nproc-per-nod; did you mean --nproc-per-node?",
    )


def test_unknown_variable_names_the_nearest(error, monkeypatch):
    from numadist import config

    monkeypatch.setattr(config, "_config", None)
    monkeypatch.setenv("NUMADIST_SPIN", "1")
    assert error("x.py") == (
        2,
        "unknown variable NUMADIST_SPIN; did you mean NUMADIST_SPIN_US? All names: docs/env.md",
    )


def test_sysfs_is_refused_for_a_real_run(error, tmp_path):
    wanted = "--sysfs is only for --dry-run and --topology: ranks run on the live machine"
    assert error("--sysfs", str(tmp_path), "x.py") == (2, wanted)


def warnings_of(capsys, *options: str) -> list[str]:
    assert main(["--dry-run", *options]) == 0
    lines = capsys.readouterr()
    return [line for line in (lines.out + lines.err).splitlines() if "note: " in line or "warning: " in line]


def test_no_numa_in_the_kernel(capsys, tmp_path):
    root = write_machine(tmp_path, cores=[[0], [1]], packages=[range(2)], nodes={})
    wanted = "numarun: note: this kernel shows no NUMA nodes; treating the machine as one node"
    assert warnings_of(capsys, "--sysfs", str(root)) == [wanted]


def test_automatic_numa_balancing(capsys, tmp_path):
    root = write_machine(tmp_path, **SOCKETS, files={"proc/sys/kernel/numa_balancing": "1"})
    wanted = (
        "numarun: warning: kernel.numa_balancing=1 moves pages and adds latency spikes; "
        "'sysctl kernel.numa_balancing=0'"
    )
    assert warnings_of(capsys, "--mem", "local", "--sysfs", str(root)) == [wanted]
    assert warnings_of(capsys, "--mem", "bind", "--sysfs", str(root)) == [], "bound memory is not balanced"


def test_read_back_differs(capfd):
    """The kernel drops node 7, which does not exist, without an error."""
    placement = RankPlacement(0, tuple(sorted(os.sched_getaffinity(0))), (0, 7), "bind", 1, 0, (0,))
    started = spawn(Start(placement, ["true"], dict(os.environ)))
    await_exec(started)
    os.waitpid(started.pid, 0)
    assert started.warnings == ["rank 0: asked memory nodes 0,7, kernel kept 0 (node 7 has no memory)"]


def test_the_segment_size_preflight_assumes_is_enough():
    from numadist import _native

    for world in (1, 2, 8, 64):
        assert _native.lib.nd_segment_bytes(world) <= segment_bytes(world)
