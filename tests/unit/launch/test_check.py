"""numarun --check: each thing it looks at, well and ill, on files written for it."""

import json

import pytest
from handmade import write_machine

from numadist.launch.cli import main
from numadist.launch.place import Request, place
from numadist.launch.preflight import (
    check,
    cpu_quota,
    governor,
    huge_pages,
    memory_nodes,
    numa_balancing,
    openmp_variables,
    preflight_warnings,
    shared_memory,
)
from numadist.topology.sysfs import read_machine


@pytest.fixture
def machine_with(tmp_path):
    """Function: files below the root -> (Machine of two nodes, root)."""

    def make(files: dict[str, str], **kwargs):
        shape = {"cores": [[0], [1]], "packages": [[0], [1]], "nodes": {0: [0], 1: [1]}, **kwargs}
        root = write_machine(tmp_path, files=files, **shape)
        return read_machine(root), str(root)

    return make


THP = "sys/kernel/mm/transparent_hugepage/enabled"
GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
BALANCING = "proc/sys/kernel/numa_balancing"


@pytest.mark.parametrize(
    ("look", "path", "well", "ill", "remedy"),
    [
        (lambda m, r: numa_balancing(m, r), BALANCING, "0", "1", "sysctl kernel.numa_balancing=0"),
        (
            lambda m, r: governor(m, r),
            GOVERNOR,
            "performance",
            "powersave",
            "cpupower frequency-set -g performance",
        ),
        (
            lambda m, r: huge_pages(r),
            THP,
            "always [madvise] never",
            "always madvise [never]",
            "echo madvise > /sys",
        ),
    ],
    ids=["balancing", "governor", "huge-pages"],
)
def test_a_kernel_setting_is_told_with_its_remedy(machine_with, look, path, well, ill, remedy):
    assert look(*machine_with({path: well})).problem is None
    assert remedy in look(*machine_with({path: ill})).problem


def test_missing_files_are_no_problem(machine_with):
    machine, root = machine_with({})
    findings = [
        numa_balancing(machine, root),
        governor(machine, root),
        huge_pages(root),
        shared_memory(2, root),
    ]
    assert [f.problem for f in findings] == [None] * 4


def test_a_node_without_usable_memory_is_named(machine_with):
    machine, _ = machine_with({}, memory_gib={0: 16})
    assert memory_nodes(machine).problem.startswith(
        "nodes 1 have CPUs here but no memory this process may use"
    )


def test_a_quota_below_the_cores_is_told(machine_with):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}
    assert "the cgroup grants 1.5 cores' time on 2 cores" in cpu_quota(machine_with(files)[0]).problem


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({}, False),
        ({"OMP_PROC_BIND": "false"}, False),
        ({"OMP_PROC_BIND": "close"}, True),
        ({"GOMP_CPU_AFFINITY": "0-3"}, True),
        ({"OMP_PLACES": "{0},{1}"}, True),
    ],
)
def test_openmp_variables_that_narrow_a_rank_are_told(environ, problem):
    assert bool(openmp_variables(environ).problem) == problem


def test_the_command_ends_with_1_exactly_when_there_is_a_problem(capsys):
    code = main(["--check", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == int(any(f["problem"] for f in findings))
    assert {f["subject"] for f in findings} >= {"memory policy", "NUMA balancing", "/dev/shm", "huge pages"}
    assert main(["--check"]) == code
    assert len(capsys.readouterr().out.splitlines()) == len(findings)


@pytest.mark.parametrize("mem", ["bind", "local"])
def test_check_and_a_run_say_the_same_of_numa_balancing(machine_with, mem):
    machine, root = machine_with({BALANCING: "1"})
    plan = place(machine, Request(mem=mem))
    found = {f.subject: f.problem for f in check(machine, plan, {}, root)}["NUMA balancing"]
    warned = [text for text in preflight_warnings(machine, plan, {}, root) if "numa_balancing" in text]
    assert warned == ([] if found is None else [found])
    assert bool(warned) == (mem != "bind")
