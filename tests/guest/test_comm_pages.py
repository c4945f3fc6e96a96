"""The memory of a process group on an emulated machine with two NUMA nodes."""

import pytest

pytestmark = pytest.mark.guest


def test_each_ranks_part_of_the_segment_is_on_its_node(two_nodes):
    check = two_nodes["segment_pages"]
    assert check.exit_code == 0, check.stderr
    seen = check.only
    assert seen["segment_wrong"] == 0, f"pages off the node they are bound to: {seen}"
    assert all(pages > 16 for pages in seen["segment_by_node"].values()), f"slots on both nodes: {seen}"


def test_each_ranks_part_of_a_shared_region_is_on_its_node(two_nodes):
    assert two_nodes["segment_pages"].only["region_nodes"] == [[0], [1]]


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
