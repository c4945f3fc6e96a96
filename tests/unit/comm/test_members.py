"""Who is in a group, where the store still has entries of a life before."""

import json
import os
import subprocess
import threading
from dataclasses import asdict, replace

import torch.distributed as dist

from numadist.comm import members


def _dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def _entry(**changes) -> str:
    return json.dumps(asdict(replace(members.this_process(), **changes)))


def test_an_entry_of_a_life_before_is_not_taken_for_a_member():
    """torchrun restarts ranks with the store they had; its test in tests/clients meets this only now and then."""
    store = dist.HashStore()
    store.set("numadist/member/1", _entry(pid=_dead_pid()))
    late = threading.Timer(0.2, lambda: store.set("numadist/member/1", _entry()))
    late.start()
    try:
        found = members.meet(store, 0, 2, 60.0)
    finally:
        late.join()
    assert [member.pid for member in found] == [os.getpid()] * 2


def test_one_that_is_not_replaced_is_a_member_that_died(monkeypatch):
    monkeypatch.setattr(members, "REPLACED_WITHIN_S", 0.05)
    store, dead = dist.HashStore(), _dead_pid()
    store.set("numadist/member/1", _entry(pid=dead))
    assert members.meet(store, 0, 2, 60.0)[1].pid == dead


def test_a_member_of_another_machine_or_namespace_is_believed(monkeypatch):
    monkeypatch.setattr(members, "REPLACED_WITHIN_S", 1e9)
    store, dead = dist.HashStore(), _dead_pid()
    for elsewhere in ({"machine": "another"}, {"pid_namespace": "pid:[1]"}):
        store.set("numadist/member/1", _entry(pid=dead, **elsewhere))
        assert members.meet(store, 0, 2, 60.0)[1].pid == dead
