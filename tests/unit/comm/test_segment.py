"""Nodes of a group's ranks, and what a wrong segment is answered with; no second process."""

import json
import os

import pytest
import torch.distributed as dist

from numadist import _native, config
from numadist.comm import segment
from numadist.errors import CommError, ConfigError

SECOND_NS = 10**9


@pytest.fixture
def set_node_map(monkeypatch):
    def set_knob(value):
        monkeypatch.setattr(config, "_config", config.load({"NUMADIST_NODE_MAP": value}))

    return set_knob


def test_nodes_of_a_subgroup_come_from_the_map_of_all_ranks(set_node_map):
    set_node_map("0|1|2,3|8")
    assert segment.nodes_of_ranks([0, 2, 3]) == [[0], [2, 3], [8]]


def test_without_a_map_nothing_is_bound(set_node_map):
    set_node_map("")
    assert segment.nodes_of_ranks([0, 1]) is None


@pytest.mark.parametrize("text", ["0|x", "0"])
def test_a_map_that_does_not_fit_is_an_error_that_shows_it(set_node_map, text):
    set_node_map(text)
    with pytest.raises(ConfigError, match=r"NUMADIST_NODE_MAP"):
        segment.nodes_of_ranks([0, 1])


def test_rank_on_another_machine_is_told_so(monkeypatch):
    monkeypatch.setattr(segment, "STALE_S", 0.0)
    store = dist.HashStore()
    place = {"machine": "elsewhere", "pid": os.getpid(), "fd": 0, "nonce": 1}
    store.set(segment.KEY, json.dumps(place))
    with pytest.raises(CommError, match="another machine"):
        segment.open_group(store, 1, 2, 5.0, [0, 1])


def test_foreign_file_is_not_taken_for_the_segment(monkeypatch, tmp_path):
    monkeypatch.setattr(segment, "STALE_S", 0.0)
    store = dist.HashStore()
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(_native.lib.nd_segment_bytes(2))
        place = {"machine": segment._machine_id(), "pid": os.getpid(), "fd": file.fileno(), "nonce": 1}
        store.set(segment.KEY, json.dumps(place))
        with pytest.raises(CommError, match="cannot open the segment"):
            segment.open_group(store, 1, 2, 5.0, [0, 1])


def test_missing_rank_times_out_naming_it():
    with pytest.raises(CommError, match=r"connect: not arrived within 0.1 s: rank 1 \(never joined\)"):
        segment.open_group(dist.HashStore(), 0, 2, 0.1, [0, 1])


def test_a_group_of_one_works_alone():
    handle = segment.open_group(dist.HashStore(), 0, 1, 5.0, [0])
    assert _native.lib.nd_barrier(handle) == 0
    assert _native.group_stats(handle, False).num_calls == 1
    assert _native.lib.nd_group_close(handle) == 0


def test_segment_is_bound_to_the_nodes_of_the_map(set_node_map):
    set_node_map("0")
    handle = segment.open_group(dist.HashStore(), 0, 1, 5.0, [0])
    with open("/proc/self/maps") as maps:
        begin = next(int(line.split("-")[0], 16) for line in maps if "memfd:numadist" in line)
    header, rank_0 = (_native.bound_nodes(begin + i * os.sysconf("SC_PAGESIZE")) for i in (0, 1))
    assert _native.lib.nd_group_close(handle) == 0
    assert (header, rank_0) == (set(), {0}), "the header is nobody's, rank 0's part is bound to node 0"


def test_refused_binding_is_a_warning_not_an_error(set_node_map, caplog):
    set_node_map("1000")  # no such node: mbind says EINVAL
    handle = segment.open_group(dist.HashStore(), 0, 1, 5.0, [0])
    assert _native.lib.nd_barrier(handle) == 0
    assert _native.lib.nd_group_close(handle) == 0
    assert "not bound to nodes [[1000]]" in caplog.text
