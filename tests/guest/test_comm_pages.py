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
