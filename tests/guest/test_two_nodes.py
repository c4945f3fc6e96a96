"""numarun, segments and in-process shards on an emulated machine with two NUMA nodes of two CPUs and 1 GiB each.

One file a machine: where several processes run tests they share them out by file, and a machine boots once.
"""

import pytest

pytestmark = [pytest.mark.guest, pytest.mark.slow]

NODE_CPUS = {0: [0, 1], 1: [2, 3]}
NUM_PAGES = 2048  # as checks/bound_rank.py touches


def test_each_rank_runs_on_its_node_and_its_pages_are_there(two_nodes):
    check = two_nodes["bound_rank"]
    assert check.exit_code == 0, check.stderr
    assert sorted(check.by_rank) == [0, 1], check.stdout
    for rank, seen in check.by_rank.items():
        assert seen["cpus"] == NODE_CPUS[rank]
        assert (seen["policy"], seen["mem_nodes"]) == ("bind", [rank])
        assert seen["pages"].keys() == {str(rank)}, f"rank {rank} has pages on {seen['pages']}"
        assert seen["pages"][str(rank)] >= NUM_PAGES


def test_the_interpreter_itself_starts_under_the_policy(two_nodes):
    for rank, seen in two_nodes["bound_rank"].by_rank.items():
        assert seen["map_policies"] == [f"bind:{rank}"]


def test_one_placement_line_a_rank_stands_on_stderr(two_nodes):
    first, *ranks = two_nodes["bound_rank"].stderr.splitlines()
    assert first.endswith("2 NUMA nodes, 4 cores (4 threads), allowed 4 CPUs; 2 ranks, 1 per NUMA node"), (
        first
    )
    assert "numarun: r1 socket 0 node 1 cpus 2-3 (2 cores) mem bind:1 " in ranks[1], ranks


def test_every_memory_policy_is_what_the_rank_reads_back(two_nodes):
    check = two_nodes["policies"]
    assert check.exit_code == 0, check.stderr
    assert check.only == {
        "bind": ["bind", [0, 1]],
        "preferred": ["preferred-many", [0, 1]],
        "interleave": ["interleave", [0, 1]],
        "local": ["local", []],
        "none": ["default", []],
    }


def test_plan_follows_the_affinity_numarun_was_started_with(two_nodes):
    plans = two_nodes["plan"].only
    assert [(r["cpus"], r["mem_nodes"]) for r in plans["whole"]] == [([0, 1], [0]), ([2, 3], [1])]
    assert [(r["cpus"], r["mem_nodes"]) for r in plans["one_cpu_of_each_node"]] == [([1], [0]), ([2], [1])]


def test_all_reduce_over_two_nodes_is_right(two_nodes):
    check = two_nodes["sharded_rank"]
    assert check.exit_code == 0, check.stderr
    assert sorted(check.by_rank) == [0, 1], check.stdout
    assert [seen["wrong_sums"] for seen in check.by_rank.values()] == [0, 0]


def test_every_page_of_a_shard_is_on_its_ranks_node_alone(two_nodes):
    for rank, seen in two_nodes["sharded_rank"].by_rank.items():
        assert seen["shard_shapes"]["0.weight"] == [1024, 64], "half of the hidden layer"
        for name, pages in seen["shard_pages"].items():
            assert pages.keys() == {str(rank)}, f"rank {rank}: {name} has pages on {pages}"
        assert seen["error"] < 1e-5


def test_every_page_of_keys_and_values_is_on_its_ranks_node_alone(two_nodes):
    for rank, seen in two_nodes["sharded_rank"].by_rank.items():
        assert seen["kv_pages"] == {str(rank): seen["kv_bytes"] / 4096}


def test_clone_puts_every_page_on_the_node_it_names(two_nodes):
    for rank, seen in two_nodes["sharded_rank"].by_rank.items():
        for node, pages in seen["clone_pages"].items():
            assert pages.keys() == {node}, f"rank {rank}: clone to node {node} has pages on {pages}"


def test_the_loader_does_not_leave_weights_in_another_nodes_page_cache(two_nodes):
    check = two_nodes["page_cache"]
    assert check.exit_code == 0, check.stderr
    seen = check.only
    assert seen["mapped"].keys() == {"1"}, "the trap is not set: a mapped file stays where it was read first"
    assert seen["loaded"].keys() == {"0"}, f"loaded weights are on {seen['loaded']}"
    assert seen["right"]


def test_each_ranks_part_of_the_segment_is_on_its_node(two_nodes):
    check = two_nodes["segment_pages"]
    assert check.exit_code == 0, check.stderr
    seen = check.only
    assert seen["segment_wrong"] == 0, f"pages off the node they are bound to: {seen}"
    assert all(pages > 16 for pages in seen["segment_by_node"].values()), f"slots on both nodes: {seen}"


def test_pages_that_are_being_moved_are_found(two_nodes):
    check = two_nodes["moving_pages"]
    assert check.exit_code == 0, check.stderr
    for pages in ("small", "huge"):
        assert check.only[pages]["moved"] > 0
        assert check.only[pages]["missed"] == 0
    assert all(node < 0 for node in check.only["untouched"])


def test_in_process_shards_are_on_the_node_of_their_threads(two_nodes):
    check = two_nodes["inprocess_pages"]
    assert check.exit_code == 0, check.stderr
    seen = check.only
    assert seen["cpus"] == [[0, 1], [2, 3]]
    assert seen["shapes"] == [[1024, 64]] * 2, "half of the hidden layer each"
    for node, pages in enumerate(seen["pages"]):
        assert all(where.keys() == {str(node)} for where in pages.values()), f"group {node}: {pages}"
    assert seen["error"] < 1e-5


def test_patched_clone_puts_every_page_on_the_node_it_names(two_nodes):
    seen = two_nodes["inprocess_pages"].only["patched_clone"]
    assert [list(where) for where in seen] == [["0"], ["1"]], seen


def test_scripts_of_fsdp2_and_of_transformers_hold_their_parts_on_their_nodes(two_nodes):
    check = two_nodes["clients_rank"]
    assert check.exit_code == 0, check.stderr
    assert sorted(check.by_rank) == [0, 1], check.stdout
    for rank, seen in check.by_rank.items():
        assert seen["group"] == "ShmGroup"
        for name, pages in (seen["fsdp_pages"] | seen["split_pages"]).items():
            assert pages.keys() == {str(rank)}, f"rank {rank}: {name} has pages on {pages}"
        assert seen["split_elements"] < 0.7 * seen["whole_elements"]
        assert seen["error"] < 1e-5
        assert seen["losses"][2] < seen["losses"][0]
        assert seen["losses"] == check.by_rank[0]["losses"]
