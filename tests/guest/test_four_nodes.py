"""numarun on an emulated machine with odd nodes: 2 has a CPU and no memory, 3 has memory and no CPU."""

import re

import pytest

pytestmark = [pytest.mark.guest, pytest.mark.slow]


def test_ranks_are_planned_for_nodes_with_cpus_and_memory_comes_from_the_nearest(four_nodes):
    seen = four_nodes["odd_nodes"]
    assert seen.exit_code == 0, seen.stderr
    assert seen.only["plan"] == [[[0], [0, 1], [0]], [[1], [2, 3], [1]], [[2], [4], [1]]]
    assert seen.only["plan_warnings"] == [
        "rank 2: node 2 has no usable memory: bound to nearest node 1 (distance 12)"
    ]


def test_each_rank_has_the_memory_it_was_planned(four_nodes):
    seen = four_nodes["bound_rank"]
    assert seen.exit_code == 0, seen.stderr
    assert {r: (o["cpus"], o["mem_nodes"]) for r, o in seen.by_rank.items()} == {
        0: ([0, 1], [0]),
        1: ([2, 3], [1]),
        2: ([4], [1]),
    }
    assert [list(seen.by_rank[r]["pages"]) for r in range(3)] == [["0"], ["1"], ["1"]]


def test_a_node_without_cpus_cannot_be_asked_for(four_nodes):
    wanted = "numarun: error: --numa-nodes 3: node has memory but no CPUs; nodes with CPUs are 0-2"
    assert four_nodes["odd_nodes"].only["node_3"] == wanted


def test_what_the_kernel_refuses_and_what_it_narrows_is_told(four_nodes):
    seen = four_nodes["odd_nodes"].only
    assert seen["bind_2"] == "set_mempolicy(MPOL_BIND, node 2): Invalid argument"
    assert seen["bind_7"] == "set_mempolicy(MPOL_BIND, node 7): Invalid argument"
    assert seen["bind_0_2"] == [0]
    assert seen["spawn_0_2"] == ["rank 0: asked memory nodes 0,2, kernel kept 0 (node 2 has no memory)"]


def test_preferred_keeps_both_nodes(four_nodes):
    seen = four_nodes["odd_nodes"].only
    assert (seen["policy_now"], seen["preferred_0_1"]) == ("preferred-many", [0, 1])


def test_an_offline_cpu_is_left_out_and_cannot_be_named(four_nodes):
    seen = four_nodes["offline_cpu"].only
    assert seen["cpus"] == [[0, 1], [2], [4]]
    assert (seen["code"], seen["error"]) == (2, "numarun: error: --cpus: CPU 3 is offline\n")


def test_numa_balancing_is_warned_of_where_it_acts(four_nodes):
    seen = four_nodes["numa_balancing"].only
    assert seen["bind"] == []
    assert seen["local"] == [
        "kernel.numa_balancing=1 moves pages and adds latency spikes; 'sysctl kernel.numa_balancing=0'"
    ]


def test_an_oom_killed_rank_is_explained_and_preferred_spills(four_nodes):
    seen = four_nodes["oom"].only
    assert seen["code"] == 137
    first = seen["stderr"].splitlines()[0]
    # The last sample may be older than the shortage: then it says "less than".
    wanted = r".* killed by signal 9 \(SIGKILL\); kernel OOM: node 1 had (less than )?\d\.\d of \d\.\d GiB free - .*"
    assert re.fullmatch(wanted, first), seen["stderr"]
    assert first.endswith(" - use --mem preferred or fewer bytes per rank")
    assert seen["preferred_code"] == 0


def test_inside_a_cpuset_only_its_cpus_and_memory_are_used(four_nodes):
    check = four_nodes["cpuset"]
    seen = check.only
    assert seen["code"] == 0, seen["stderr"]
    assert seen["ranks"] == [[0, [1], [0]], [1, [2], [0]]]
    assert (
        "warning: rank 1: node 1 has no usable memory: bound to nearest node 0 (distance 20)"
        in seen["stderr"]
    )
    assert seen["outside"] == "numarun: error: --cpus: CPU 0 is not in the allowed set 1-2\n"
    assert seen["strict"] == (
        "numarun: error: rank 1: memory node 1 is not in Mems_allowed 0 (cpuset.mems); "
        "start the container with --cpuset-mems=0,1 or use --mem none\n"
    )
