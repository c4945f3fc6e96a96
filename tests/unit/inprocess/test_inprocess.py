"""The in-process variant: same answers as the unsharded model, pinned threads, weights where they belong."""

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from numadist import inprocess
from numadist.errors import PlacementError
from numadist.inprocess.exchange import Exchange
from numadist.inprocess.thread_groups import Place, ThreadGroups, places_of
from numadist.memory.pages import num_pages, page_nodes
from numadist.topology.synthetic import synthetic


def test_one_place_a_node_and_virtual_nodes_only_on_one_node():
    two = synthetic("package:2 node:1 core:4 cpu:2")
    assert [(p.cpus, p.node) for p in places_of(two, None)] == [((0, 1, 2, 3), 0), ((4, 5, 6, 7), 1)]
    one = synthetic("package:1 node:1 core:5 cpu:1")
    assert [p.cpus for p in places_of(one, 2)] == [(0, 1), (2, 3, 4)]
    for machine, count in ((two, 3), (one, 6), (one, 0)):
        with pytest.raises(PlacementError, match=f"asked for {count} thread groups"):
            places_of(machine, count)


@pytest.fixture
def cpus():
    return sorted(os.sched_getaffinity(0))


def test_threads_are_pinned_and_persistent(cpus):
    team = ThreadGroups([Place((cpus[0],), None), Place((cpus[-1],), None)])
    try:
        seen = team.run(lambda i: (os.sched_getaffinity(0), torch.get_num_threads()))
        assert seen == [({cpus[0]}, 1), ({cpus[-1]}, 1)]
        assert sorted(os.sched_getaffinity(0)) == cpus, "the caller's own affinity is untouched"
    finally:
        team.close()


def test_an_error_in_one_thread_reaches_the_caller_and_the_team_lives_on(cpus):
    team = ThreadGroups([Place((cpus[0],), None)] * 2)

    def fail(i):
        if i == 1:
            raise ValueError("thread 1")
        return i

    try:
        with pytest.raises(ValueError, match="thread 1"):
            team.run(fail)
        assert team.run(lambda i: i) == [0, 1]
    finally:
        team.close()


def test_an_interrupted_run_leaves_no_results_to_the_next(cpus):
    team = ThreadGroups([Place((cpus[0],), None)] * 2)
    go = threading.Event()

    def wait_for_go(i):
        go.wait()
        return "of the interrupted run"

    try:
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            team.run(wait_for_go)
        go.set()
        assert team.run(lambda i: i) == [0, 1]
    finally:
        team.close()


def test_threads_end_with_the_team_and_a_closed_one_refuses(cpus):
    team = ThreadGroups([Place((cpus[0],), None)] * 2)
    team.run(lambda i, team=team: i)  # a function that holds the team does not keep it
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("numadist-node")]
    del team
    gc.collect()
    assert not any(thread.is_alive() for thread in mine)
    closed = ThreadGroups([Place((cpus[0],), None)])
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.run(lambda i: i)


ENDING = """
import sys, threading, time
import torch
from numadist.inprocess.thread_groups import Place, ThreadGroups

team = ThreadGroups([Place((%d,), None)])
begun = threading.Event()
x = torch.ones(400, 400)

def compute(i):
    begun.set()
    for _ in range(200):
        torch.mm(x, x)
    print("computed", flush=True)

threading.Thread(target=lambda: team.run(compute), daemon=True).start()
begun.wait()
raise SystemExit(7)
"""


def test_a_process_that_ends_while_they_compute_does_not_abort(cpus):
    done = subprocess.run([sys.executable, "-c", ENDING % cpus[0]], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "computed\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_right_and_equal_on_all_threads(cpus, world, dtype):
    team, exchange = ThreadGroups([Place((cpus[0],), None)] * world), Exchange(world)
    try:
        for size in (1, 1000, 70001):
            parts = [torch.randn(size).to(dtype) for _ in range(world)]
            totals = team.run(lambda i, parts=parts: exchange.all_reduce(parts[i], i))
            expected = sum(p.float() for p in parts).to(dtype)
            assert all(torch.equal(t, totals[0]) for t in totals)
            torch.testing.assert_close(totals[0], expected)
    finally:
        team.close()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_model_gives_the_unsharded_answer(compile):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(2, 5, 48)
    split = inprocess.shard(model, x, nodes=2, compile=compile)
    try:
        with torch.no_grad():
            expected = model(x)
        shapes = [tuple(dict(g.named_parameters())["0.up.weight"].shape) for g in split.local]
        assert shapes == [(48, 48), (48, 48)]
        for _ in range(3):
            torch.testing.assert_close(split(x), expected, rtol=1e-5, atol=1e-5)
    finally:
        split.close()


def test_language_models_give_the_unsharded_answer_and_weights_are_bound():
    pytest.importorskip("transformers", reason="needs the extra `models`")
    from numadist import models

    for name in ("gpt2-tiny", "llama-tiny"):
        model = models.build(name)
        inputs = {"input_ids": torch.arange(9)[None], "use_cache": False, "logits_to_keep": 1}
        split = inprocess.shard(model, inputs, nodes=2)
        try:
            with torch.no_grad():
                expected = model(**inputs).logits
            assert (split(input_ids=inputs["input_ids"]).logits - expected).abs().max().item() < 1e-5
            for parameter in split.local[0].parameters():
                assert page_nodes(parameter) == {0: num_pages(parameter)}
        finally:
            split.close()
