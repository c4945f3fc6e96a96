"""Placement on machines written by hand: each is the shape of a public report of a launcher going wrong."""

import json

import pytest
from handmade import write_machine

from numadist.launch.cli import main


@pytest.fixture
def dry_run(tmp_path, capsys):
    """Function: (machine as keywords of write_machine, options) -> the JSON of numarun --dry-run."""

    def run(*options: str, **machine) -> dict:
        root = write_machine(tmp_path / "root", **machine)
        code = main(["--dry-run", "--json", "--omp-threads", "auto", "--sysfs", str(root), *options])
        out = capsys.readouterr()
        assert code == 0, out.err
        return json.loads(out.out)

    return run


def single_threads(count: int) -> list[list[int]]:
    return [[cpu] for cpu in range(count)]


def where(plan: dict) -> list[tuple]:
    return [(r["numa_nodes"], r["cpus"], r["mem_nodes"]) for r in plan["ranks"]]


def test_snc_nodes_of_43_43_42_cores_are_each_used_whole(dry_run):
    bounds = [range(0, 43), range(43, 86), range(86, 128)]
    plan = dry_run(
        cores=single_threads(128),
        packages=[range(128)],
        nodes={n: list(cpus) for n, cpus in enumerate(bounds)},
    )
    assert where(plan) == [([n], list(cpus), [n]) for n, cpus in enumerate(bounds)]
    assert [r["threads"] for r in plan["ranks"]] == [43, 43, 42]


def test_uneven_nodes_are_cut_inside_each_and_no_rank_crosses(dry_run):
    plan = dry_run(
        "--nproc-per-numa",
        "2",
        cores=single_threads(9),
        packages=[range(9)],
        nodes={0: range(0, 5), 1: range(5, 9)},
    )
    assert [r["cpus"] for r in plan["ranks"]] == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]


def test_nps4_with_memory_on_two_nodes_takes_the_nearest(dry_run):
    near = {0: (10, 12, 20, 20), 1: (12, 10, 20, 20), 2: (20, 20, 10, 12), 3: (20, 20, 12, 10)}
    plan = dry_run(
        cores=single_threads(8),
        packages=[range(8)],
        nodes={n: range(2 * n, 2 * n + 2) for n in range(4)},
        memory_gib={1: 16, 2: 16},
        distances=near,
    )
    assert where(plan) == [([0], [0, 1], [1]), ([1], [2, 3], [1]), ([2], [4, 5], [2]), ([3], [6, 7], [2])]
    assert plan["warnings"] == [
        "rank 0: node 0 has no usable memory: bound to nearest node 1 (distance 12)",
        "rank 3: node 3 has no usable memory: bound to nearest node 2 (distance 12)",
    ]


def test_twelve_nodes_are_ordered_by_number_not_by_text(dry_run):
    plan = dry_run(
        cores=single_threads(24), packages=[range(24)], nodes={n: range(2 * n, 2 * n + 2) for n in range(12)}
    )
    assert [r["numa_nodes"] for r in plan["ranks"]] == [[n] for n in range(12)]


def test_nodes_that_list_the_same_cpus_are_one_rank_over_all_their_memory(dry_run):
    """numa=fake=12 makes memory nodes, not places to run."""
    plan = dry_run(cores=single_threads(4), packages=[range(4)], nodes=dict.fromkeys(range(12), range(4)))
    assert where(plan) == [(list(range(12)), [0, 1, 2, 3], list(range(12)))]


def test_no_node_directory_is_one_node_with_a_note(dry_run):
    plan = dry_run(cores=single_threads(4), packages=[range(4)], nodes={})
    assert where(plan) == [([0], [0, 1, 2, 3], [0])]
    assert plan["ranks"][0]["mem_policy"] == "none", "a kernel without NUMA has no policy to set"
    assert plan["machine"]["notes"] == ["this kernel shows no NUMA nodes; treating the machine as one node"]


def test_siblings_numbered_next_to_each_other_give_one_cpu_a_core(dry_run):
    plan = dry_run(cores=[[0, 1], [2, 3]], packages=[range(4)], nodes={0: range(4)})
    assert plan["ranks"][0]["cpus"] == [0, 2]
    assert plan["ranks"][0]["threads"] == 2


def test_nodes_4_to_7_alone_are_enough(dry_run):
    plan = dry_run(
        cores=single_threads(8),
        packages=[range(8)],
        nodes={n: range(2 * (n - 4), 2 * (n - 4) + 2) for n in range(4, 8)},
    )
    assert [r["numa_nodes"] for r in plan["ranks"]] == [[4], [5], [6], [7]]


def test_a_rank_over_three_nodes_binds_the_memory_of_all_three(dry_run):
    plan = dry_run(
        "--nproc-per-socket",
        "1",
        cores=single_threads(6),
        packages=[range(6)],
        nodes={0: (0, 1), 1: (2, 3), 2: (4, 5)},
    )
    assert where(plan) == [([0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2])]
    assert plan["warnings"] == []


def test_a_count_that_fits_no_node_crosses_with_a_warning(dry_run):
    plan = dry_run(
        "--nproc-per-socket",
        "2",
        cores=single_threads(6),
        packages=[range(6)],
        nodes={0: (0, 1), 1: (2, 3), 2: (4, 5)},
    )
    assert where(plan) == [([0, 1], [0, 1, 2], [0, 1]), ([1, 2], [3, 4, 5], [1, 2])]
    assert plan["warnings"] == [
        "--nproc-per-socket 2 on socket 0 with 3 NUMA nodes: some ranks cross a node; "
        "a multiple or a divisor of 3 keeps each rank on whole nodes"
    ]


def test_nproc_per_node_spreads_over_the_machine(dry_run):
    machine = {
        "cores": single_threads(8),
        "packages": [range(4), range(4, 8)],
        "nodes": {n: range(2 * n, 2 * n + 2) for n in range(4)},
    }
    assert where(dry_run("--nproc-per-node", "2", **machine)) == [
        ([0, 1], [0, 1, 2, 3], [0, 1]),
        ([2, 3], [4, 5, 6, 7], [2, 3]),
    ]
    assert [r["cpus"] for r in dry_run("--nproc-per-node", "8", **machine)["ranks"]] == [
        [c] for c in range(8)
    ]


HYBRID = {
    "cores": [[0, 1], [2, 3], [4], [5], [6], [7]],
    "packages": [range(8)],
    "nodes": {0: range(8)},
    "files": {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"},
}


def test_hybrid_uses_all_cores_unless_only_fast_ones_are_asked(dry_run):
    assert dry_run(**HYBRID)["ranks"][0]["cpus"] == [0, 2, 4, 5, 6, 7]
    assert dry_run("--cores", "perf", **HYBRID)["ranks"][0]["cpus"] == [0, 2]


def test_hybrid_arm_is_told_by_capacity(dry_run):
    capacities = {f"sys/devices/system/cpu/cpu{c}/cpu_capacity": "1024" if c > 1 else "446" for c in range(4)}
    plan = dry_run(
        "--cores", "perf", cores=single_threads(4), packages=[range(4)], nodes={0: range(4)}, files=capacities
    )
    assert plan["ranks"][0]["cpus"] == [2, 3]


QUOTA_MACHINE = {
    "cores": single_threads(96),
    "packages": [range(48), range(48, 96)],
    "nodes": {0: range(48), 1: range(48, 96)},
}
QUOTA_FILES = {
    "v2": {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/cpu.max": "760000 100000",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
    },
    "v1": {
        "proc/self/cgroup": "5:cpu,cpuacct:/a",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "760000",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
    },
}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cpu_quota_cuts_threads_with_a_warning(dry_run, version):
    plan = dry_run(**QUOTA_MACHINE, files=QUOTA_FILES[version])
    assert [r["threads"] for r in plan["ranks"]] == [4, 3]
    assert [len(r["cpus"]) for r in plan["ranks"]] == [48, 48], "the quota is time, not places"
    assert plan["warnings"] == [
        "cgroup CPU quota is 7.6 cores but ranks would run 96 threads; using 7 (--omp-threads to override)"
    ]


def test_omp_threads_overrides_the_quota(dry_run):
    plan = dry_run("--omp-threads", "48", **QUOTA_MACHINE, files=QUOTA_FILES["v2"])
    assert ([r["threads"] for r in plan["ranks"]], plan["warnings"]) == ([48, 48], [])


def test_offline_cpus_that_a_node_lists_are_left_out(dry_run):
    plan = dry_run(cores=single_threads(4), packages=[range(4)], nodes={0: range(4)}, online=[0, 1, 3])
    assert plan["ranks"][0]["cpus"] == [0, 1, 3]


def test_reserve_keeps_the_last_cores_of_each_rank_free(dry_run):
    plan = dry_run(
        "--reserve", "1", cores=single_threads(8), packages=[range(8)], nodes={0: range(4), 1: range(4, 8)}
    )
    assert [(r["cpus"], r["threads"]) for r in plan["ranks"]] == [([0, 1, 2], 3), ([4, 5, 6], 3)]


def test_selected_sockets_and_nodes_get_all_ranks(dry_run):
    machine = {
        "cores": single_threads(8),
        "packages": [range(4), range(4, 8)],
        "nodes": {0: range(4), 1: range(4, 8)},
    }
    assert where(dry_run("--sockets", "1", **machine)) == [([1], [4, 5, 6, 7], [1])]
    assert where(dry_run("--numa-nodes", "1", **machine)) == [([1], [4, 5, 6, 7], [1])]


def test_explicit_cpus_are_taken_literally_and_memory_follows_them(dry_run):
    machine = {
        "cores": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "packages": [range(8)],
        "nodes": {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)},
    }
    plan = dry_run("--cpus", "0,4|1-2", **machine)
    assert where(plan) == [([0], [0, 4], [0]), ([0, 1], [1, 2], [0, 1])]
    assert [r["threads"] for r in plan["ranks"]] == [1, 2], "threads are cores, not CPUs"


def test_a_container_with_half_the_cpus_and_one_memory_node_is_planned_inside_them(dry_run):
    """docker --cpuset-cpus=40-79 --cpuset-mems=1: nothing outside is tried, nothing is lost inside."""
    machine = {
        "cores": single_threads(80),
        "packages": [range(40), range(40, 80)],
        "nodes": {0: range(40), 1: range(40, 80)},
    }
    plan = dry_run("--allowed-cpus", "40-79", "--allowed-mems", "1", **machine)
    assert where(plan) == [([1], list(range(40, 80)), [1])]
    assert (plan["ranks"][0]["mem_policy"], plan["warnings"]) == ("bind", [])


TWO_NODES = {"cores": single_threads(4), "packages": [range(4)], "nodes": {0: (0, 1), 1: (2, 3)}}


def refused(capsys, root, *options: str) -> str:
    assert main(["--dry-run", "--json", "--sysfs", str(root), *options]) == 2
    return capsys.readouterr().err


def test_a_cpuset_without_a_usable_cpu_is_an_error_with_both_sets(tmp_path, capsys):
    root = write_machine(tmp_path, **TWO_NODES)
    wanted = "numarun: error: no usable CPU: online 0-3, allowed 9 (cpuset or affinity of this process)\n"
    assert refused(capsys, root, "--allowed-cpus", "9") == wanted


def test_a_cpuset_without_a_usable_memory_node_is_an_error_unless_memory_is_left_alone(tmp_path, capsys):
    root = write_machine(tmp_path, **TWO_NODES)
    wanted = "numarun: error: rank 0: no memory node is usable; allowed memory nodes are 9; use --mem none\n"
    assert refused(capsys, root, "--allowed-mems", "9") == wanted
    assert main(["--dry-run", "--json", "--sysfs", str(root), "--allowed-mems", "9", "--mem", "none"]) == 0


def test_hybrid_is_told_by_the_base_clock(dry_run):
    clocks = {
        f"sys/devices/system/cpu/cpu{c}/cpufreq/base_frequency": "3000000" if c < 2 else "1800000"
        for c in range(4)
    }
    plan = dry_run(
        "--cores", "perf", cores=single_threads(4), packages=[range(4)], nodes={0: range(4)}, files=clocks
    )
    assert plan["ranks"][0]["cpus"] == [0, 1]


@pytest.mark.parametrize("clock", [None, "2000000"])
def test_perf_cores_of_a_machine_that_knows_none_are_an_error(tmp_path, capsys, clock):
    files = {f"sys/devices/system/cpu/cpu{c}/cpufreq/base_frequency": clock for c in range(4) if clock}
    root = write_machine(
        tmp_path, cores=single_threads(4), packages=[range(4)], nodes={0: range(4)}, files=files
    )
    assert main(["--dry-run", "--cores", "perf", "--sysfs", str(root)]) == 2
    assert "no faster and slower cores" in capsys.readouterr().err


BAD = {
    "sys/devices/system/cpu/online": "0-x",
    "sys/devices/system/node/online": "zero",
    "sys/devices/system/node/node0/cpulist": "0-3,,9",
    "sys/devices/system/node/node0/distance": "ten",
    "sys/devices/system/cpu/cpu0/cpu_capacity": "fast",
}


@pytest.mark.parametrize("path", BAD)
def test_a_bad_line_names_its_file(tmp_path, capsys, path):
    machine = {"cores": single_threads(4), "packages": [range(4)], "nodes": {0: range(4)}}
    root = write_machine(tmp_path, **machine, files={path: BAD[path]})
    assert main(["--dry-run", "--sysfs", str(root)]) == 2
    assert str(root / path) in capsys.readouterr().err


def test_nul_bytes_at_the_end_of_a_file_are_no_part_of_it(dry_run):
    files = {"sys/devices/system/cpu/online": "0-3\n\0\0"}
    plan = dry_run(cores=single_threads(4), packages=[range(4)], nodes={0: range(4)}, files=files)
    assert plan["ranks"][0]["cpus"] == [0, 1, 2, 3]
