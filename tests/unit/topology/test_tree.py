"""TopoTree: building from recorded machines, transforms, keys, counts and the order of threads."""

from collections.abc import Sequence

import pytest

from numadist.errors import TopologyError
from numadist.topology.synthetic import synthetic
from numadist.topology.sysfs import read_machine
from numadist.topology.tree import (
    TopoNode,
    TopoTree,
    breadth_first,
    build_tree,
    enumerate_trees,
    group,
    remove,
    service_configs,
    service_key,
    tree_key,
)


def uniform(*levels: tuple[str, int]) -> TopoTree:
    """A regular tree below a Machine; leaves are numbered left to right."""
    numbers = iter(range(1 << 20))

    def node(kind: str, below: Sequence[tuple[str, int]]) -> TopoNode:
        if not below:
            return TopoNode(kind, os=next(numbers))
        (inner, count), rest = below[0], below[1:]
        return TopoNode(kind, children=tuple(node(inner, rest) for _ in range(count)))

    return TopoTree(node("Machine", levels))


HASWELL = uniform(("Package", 2), ("Core", 6), ("Pu", 2))
CORE = 2  # depth of Core in HASWELL


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("128arm-2pa2n8cluster4co", {"Package": 2, "Numa+Llc": 4, "Cluster": 32, "Core+Pu": 128}),
        ("32intel64-2p8co2t+8ve", {"Package+Numa+Llc": 2, "Core": 16, "Pu": 32}),
        ("64amd64-4s2n4ca2co", {"Package": 4, "Numa+Llc": 8, "Core": 32, "Pu": 64}),
        ("memorysidecaches", {"Package+Llc": 2, "Numa": 4, "Core": 40, "Pu": 80}),
        ("nvidiagpunumanodes", {"Package+Numa": 2, "Llc+L2": 4, "Core": 8, "Pu": 32}),
        ("96em64t-4no4pa3ca2co", {"Numa": 4, "Package+Llc": 16, "L2": 48, "Core+Pu": 96}),
    ],
)
def test_levels_of_a_recorded_machine_are_ordered_by_inclusion(dump, name, levels):
    root = dump(name).root
    tree = build_tree(read_machine(root), root)
    tree.validate()
    seen = {kind: len(tree.level(depth)) for depth, kind in enumerate(tree.kinds)}
    assert seen == {"Machine": 1, **levels}
    assert tree.regular
    assert sorted(tree.root.cpus) == list(read_machine(root).allowed_cpus)


def test_a_machine_with_a_missing_core_is_irregular_and_offers_only_its_nodes(dump):
    root = dump("offline-cpu0-node0").root
    tree = build_tree(read_machine(root), root)
    assert not tree.regular
    (config,) = service_configs(tree).values()
    assert config.rank_kind == "Package+Numa+Llc"
    assert [len(cpus) for cpus in config.ranks] == [9, 8]


def test_synthetic_machine_has_the_levels_it_names(tmp_path):
    tree = build_tree(synthetic("package:2 node:2 core:8 cpu:2"), tmp_path)
    assert tree.kinds == ("Machine", "Package", "Numa", "Core", "Pu")


def test_group_puts_neighbours_together_and_moves_the_rest_down():
    tree = group(HASWELL, CORE, 3)
    assert tree.kinds == ("Machine", "Package", "Group", "Core", "Pu")
    assert [node.cpus for node in tree.level(2)] == [tuple(range(i, i + 6)) for i in range(0, 24, 6)]


@pytest.mark.parametrize("stride", [0, 1, 4, 5, 6, 7])
def test_a_stride_that_does_not_divide_is_refused(stride):
    with pytest.raises(TopologyError, match=f"stride {stride} does not cut the 6 children of a Package"):
        group(HASWELL, CORE, stride)


def test_threads_of_a_core_are_never_grouped():
    with pytest.raises(TopologyError, match="a core is never split"):
        group(uniform(("Core", 2), ("Pu", 4)), 2, 2)


def test_remove_acts_under_every_parent():
    tree = remove(HASWELL, CORE, [5])
    assert [len(p.children) for p in tree.level(1)] == [5, 5]
    with pytest.raises(TopologyError, match="cannot remove"):
        remove(HASWELL, CORE, range(6))
    with pytest.raises(TopologyError, match="cannot remove"):
        remove(HASWELL, CORE, [6])


def without_core(package: int) -> TopoTree:
    packages = list(HASWELL.root.children)
    packages[package] = TopoNode("Package", children=packages[package].children[1:])
    return TopoTree(TopoNode("Machine", children=tuple(packages)))


def test_key_tells_how_many_cores_are_left_but_not_which():
    assert tree_key(remove(HASWELL, CORE, [0])) == tree_key(remove(HASWELL, CORE, [5]))
    assert tree_key(without_core(0)) == tree_key(without_core(1))
    assert len({tree_key(t) for t in (HASWELL, without_core(0), remove(HASWELL, CORE, [0]))}) == 3


def test_groups_that_are_not_ranks_do_not_change_the_service():
    by_two, by_three = group(HASWELL, CORE, 2), group(HASWELL, CORE, 3)
    assert tree_key(by_two) != tree_key(by_three)
    assert service_key(by_two, 1) == service_key(by_three, 1) == service_key(HASWELL, 1)
    assert service_key(by_two, 2) != service_key(by_three, 2), "as ranks they hold 2 and 3 cores"


def test_attributes_enter_the_key():
    slow = TopoTree(
        TopoNode("Machine", children=(TopoNode("Core", (("cls", 1),), os=0), TopoNode("Core", os=1)))
    )
    same = TopoTree(
        TopoNode("Machine", children=(TopoNode("Core", os=7), TopoNode("Core", (("cls", 1),), os=9)))
    )
    plain = uniform(("Core", 2))
    assert tree_key(slow) == tree_key(same) != tree_key(plain)


@pytest.mark.parametrize(
    ("levels", "num_trees"),
    [
        ([("Package", 1), ("Core", 2)], 2),
        ([("Package", 2), ("Core", 6), ("Pu", 2)], 56),
        ([("Package", 2), ("Core", 15), ("Pu", 2)], 144),
        ([("Package", 4), ("Core", 10), ("Pu", 2)], 288),
        ([("Package", 2), ("Llc", 16), ("Core", 4), ("Pu", 2)], 1024),
        ([("Package", 2), ("Numa", 4), ("Llc", 4), ("Core", 4), ("Pu", 2)], 1024),
        ([("Package", 2), ("Numa", 2), ("Cluster", 8), ("Core", 4)], 448),
        ([("Package", 2), ("Numa", 2), ("Core", 32)], 448),
        ([("Package", 2), ("Numa", 4), ("Core", 14), ("Pu", 2)], 832),
    ],
)
def test_number_of_distinct_trees_of_known_machines(levels, num_trees):
    assert sum(1 for _ in enumerate_trees(uniform(*levels))) == num_trees


def test_number_of_services_of_a_two_socket_haswell():
    assert len(service_configs(HASWELL)) == 68


def test_threads_go_to_each_domain_in_turn_and_second_threads_come_last():
    tree = uniform(("Numa", 1), ("Llc", 2), ("Core", 3), ("Pu", 2))
    assert breadth_first(tree.root) == (0, 6, 2, 8, 4, 10, 1, 7, 3, 9, 5, 11)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keeping_k_cores_a_domain_is_a_prefix_of_the_order(keep):
    tree = uniform(("Numa", 2), ("Llc", 4), ("Core", 4))
    thinned = remove(tree, 3, range(keep, 4))
    prefix = breadth_first(tree.root)[: 2 * 4 * keep]
    assert sorted(prefix) == sorted(thinned.root.cpus)


def test_a_cache_across_nodes_is_left_out_with_a_note(dump, tmp_path):
    """Two nodes of two cores; one cache claims cores 1 and 2, of different nodes."""
    machine = synthetic("node:2 core:2")
    for cpu, shared in {0: "0", 1: "1-2", 2: "1-2", 3: "3"}.items():
        cache = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        cache.mkdir(parents=True)
        for name, text in {"level": "3", "type": "Unified", "size": "8M", "shared_cpu_list": shared}.items():
            (cache / name).write_text(text)
    tree = build_tree(machine, tmp_path)
    assert tree.notes == ("Llc cuts across Numa and is left out of the tree",)
    assert "Llc" not in "".join(tree.kinds)
