"""How ranks find each other, and what a wrong segment is answered with; the other ranks are entries in a store."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from numadist import _native, config
from numadist.comm import members, segment
from numadist.errors import CollectiveTimeout, CommError, PeerLost

ME = members.this_process()


@pytest.fixture
def set_nodes(monkeypatch):
    def set_knob(value):
        monkeypatch.setattr(config, "_config", config.load({"NUMADIST_NODES": value}))

    return set_knob


def open_group(store, rank, everybody, timeout_s=60.0):
    return segment.open_group(store, range(len(everybody)), rank, everybody, timeout_s)


def test_ranks_tell_each_other_their_nodes(set_nodes):
    set_nodes("2-3,5")
    store = dist.HashStore()
    store.set("numadist/member/1", json.dumps(asdict(replace(ME, nodes=(8,)))))
    found = members.meet(store, 0, 2, 60.0)
    assert [m.nodes for m in found] == [(2, 3, 5), (8,)]
    assert segment.nodes_of(found) == [[2, 3, 5], [8]]


def test_without_nodes_of_every_rank_nothing_is_bound():
    assert segment.nodes_of([replace(ME, nodes=(0,)), replace(ME, nodes=())]) is None


def test_machines_come_in_the_order_of_their_first_rank():
    everybody = [replace(ME, machine=name) for name in "baab"]
    assert members.machines_of(everybody) == [[0, 3], [1, 2]]


def test_a_rank_that_never_joined_is_named():
    with pytest.raises(
        CollectiveTimeout, match=r"rank 1: .* within 0.1 s: rank 0 \(never joined\), rank 2 \(never joined\)"
    ):
        members.meet(dist.HashStore(), 1, 3, 0.1)


def test_ranks_of_two_pid_namespaces_are_told_so():
    everybody = [ME, replace(ME, pid_namespace="pid:[1]")]
    with pytest.raises(
        CommError, match=r"rank 1 in pid:\[1\] of the same machine.*--pid=host.*NUMADIST_MACHINE"
    ):
        open_group(dist.HashStore(), 0, everybody)


def test_foreign_file_is_not_taken_for_the_segment(monkeypatch, tmp_path):
    monkeypatch.setattr(segment, "STALE_S", 0.0)
    store = dist.HashStore()
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(_native.lib.nd_segment_bytes(2))
        place = {"pid": os.getpid(), "fd": file.fileno(), "nonce": 1}
        store.set(segment.key_of([0, 1]), json.dumps(place))
        with pytest.raises(CommError, match=r"rank 1 cannot open the segment of rank 0"):
            open_group(store, 1, [ME, ME])


def test_a_rank_that_comes_but_does_not_open_times_out_naming_it():
    with pytest.raises(CommError, match=r"connect: not arrived within 0.1 s: rank 1 \(never joined\)"):
        open_group(dist.HashStore(), 0, [ME, ME], 0.1)


@pytest.fixture
def dead():
    """A member whose process is gone."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return replace(ME, pid=process.pid)


def test_a_rank_that_died_before_it_opened_is_lost(dead):
    with pytest.raises(PeerLost, match=rf"rank 1 \(pid {dead.pid}\) is gone"):
        open_group(dist.HashStore(), 0, [ME, dead], 60.0)


def test_a_first_rank_that_died_before_it_made_the_segment_is_lost(dead):
    with pytest.raises(PeerLost, match=rf"rank 0 \(pid {dead.pid}\) is gone"):
        open_group(dist.HashStore(), 1, [dead, ME], 60.0)


def test_a_group_of_one_works_alone():
    handle = open_group(dist.HashStore(), 0, [ME])
    assert _native.lib.nd_barrier(handle) == 0
    assert _native.group_stats(handle, False).num_calls == 1
    assert _native.lib.nd_group_close(handle) == 0


def test_segment_is_bound_to_the_nodes_of_its_ranks():
    handle = open_group(dist.HashStore(), 0, [replace(ME, nodes=(0,))])
    with open("/proc/self/maps") as maps:
        begin = next(int(line.split("-")[0], 16) for line in maps if "memfd:numadist" in line)
    header, rank_0 = (_native.bound_nodes(begin + i * os.sysconf("SC_PAGESIZE")) for i in (0, 1))
    assert _native.lib.nd_group_close(handle) == 0
    assert (header, rank_0) == (set(), {0}), "the header is nobody's, rank 0's part is bound to node 0"


def test_refused_binding_is_a_warning_not_an_error(caplog):
    # No such node: mbind says EINVAL.
    handle = open_group(dist.HashStore(), 0, [replace(ME, nodes=(1000,))])
    assert _native.lib.nd_barrier(handle) == 0
    assert _native.lib.nd_group_close(handle) == 0
    assert "not bound to nodes [[1000]]" in caplog.text
