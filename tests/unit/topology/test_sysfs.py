"""The sysfs reader on recorded machines: every count equals what hwloc says about the same files."""

import pytest

from numadist.errors import TopologyError
from numadist.topology.cpuset import parse_list
from numadist.topology.render import render, summary
from numadist.topology.sysfs import read_machine

# hwloc counts the two threads of an AMD Bulldozer module as cores; the kernel's sibling lists say one core.
HWLOC_COUNTS_MODULES_AS_CORES = {"64amd64-4s2n4ca2co"}


def machine_of(recorded):
    allowed = recorded.expected.get("allowed")
    if allowed is None:
        return read_machine(recorded.root)
    return read_machine(recorded.root, parse_list(allowed["cpus"]), parse_list(allowed["mems"]))


def test_online_cpus_and_nodes_are_what_the_files_say(recorded):
    machine, sysfs = machine_of(recorded), recorded.expected["sysfs"]
    assert machine.online_cpus == parse_list(sysfs["online_cpus"])
    seen = {str(n.id): (n.online_cpus, n.memory_bytes // 1024) for n in machine.nodes}
    assert seen == {n: (parse_list(v["cpus"]), v["mem_kB"]) for n, v in sysfs["nodes"].items()}


def test_cores_and_their_threads_equal_hwlocs(recorded):
    machine, hwloc = machine_of(recorded), recorded.expected["hwloc_expected"]
    if recorded.expected["name"] in HWLOC_COUNTS_MODULES_AS_CORES:
        assert len(machine.cores) * 2 == hwloc["n_cores"]
    else:
        assert sorted(c.cpus for c in machine.cores) == sorted(parse_list(text) for text in hwloc["core_pus"])


def test_packages_equal_hwlocs(recorded):
    machine, hwloc = machine_of(recorded), recorded.expected["hwloc_expected"]
    with_cpus = [p for p in hwloc["packages"] if p["cpus"]]
    assert sorted(p.cpus for p in machine.packages) == sorted(parse_list(p["cpus"]) for p in with_cpus)
    if all(p["os_index"] is not None for p in with_cpus):
        assert {p.id for p in machine.packages} == {p["os_index"] for p in with_cpus}


def test_nodes_without_cpus_are_in_no_domain(recorded):
    machine = machine_of(recorded)
    homed = {n for d in machine.domains for n in d.nodes}
    assert not homed & set(recorded.expected["sysfs"]["nodes_without_cpus"])


def test_distance_row_of_a_node_starts_at_itself(recorded):
    for node in machine_of(recorded).nodes:
        assert node.distances[node.id] == 10, f"node {node.id}: {node.distances}"


def test_render_names_every_node(recorded):
    machine = machine_of(recorded)
    text = render(machine)
    for node in machine.nodes:
        assert f"node {node.id}:" in text, text


def test_distance_columns_belong_to_online_nodes_in_order(dump):
    machine = read_machine(dump("nvidiagpunumanodes").root)
    assert machine.node(0).distances == {0: 10, 8: 40, **dict.fromkeys(range(250, 256), 80)}


def test_cpulist_is_cut_to_online_cpus(dump):
    machine = read_machine(dump("offline-cpu0-node0").root)
    assert machine.cores[0].node is None, "package 0 has no node, so its cores are in none"
    assert {c.node for c in machine.cores} == {None, 1}


def test_package_ids_of_minus_one_are_counted_instead(dump):
    machine = read_machine(dump("256ppc-8n8s4t").root)
    assert [p.id for p in machine.packages] == list(range(64))


def test_a_root_without_sysfs_is_refused(tmp_path):
    with pytest.raises(TopologyError, match=r"no sys/devices/system/cpu below .*--sysfs wants a directory"):
        read_machine(tmp_path)


def test_no_allowed_cpu_is_refused_with_both_sets(dump):
    with pytest.raises(TopologyError, match=r"no usable CPU: online 0-31, allowed 99"):
        read_machine(dump("32intel64-2p8co2t+8ve").root, allowed_cpus=[99])


def test_summary_counts_what_is_allowed(dump):
    root = dump("64amd64-4s2n4ca2co").root
    whole = read_machine(root)
    cpus = [cpu for core in whole.domains[0].cores for cpu in core.cpus]
    assert summary(whole).startswith("4 sockets, 8 NUMA nodes, ")
    assert summary(read_machine(root, cpus)).startswith("1 socket, 1 of 8 NUMA nodes, ")


def test_live_machine_has_this_process_cpus():
    import os

    assert set(read_machine().allowed_cpus) == os.sched_getaffinity(0)
