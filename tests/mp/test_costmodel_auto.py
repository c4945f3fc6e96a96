"""numadist.plan(ranks="auto", blocks="auto") over real ranks: whatever it chooses, the answer is right everywhere."""

from dataclasses import replace

import pytest
import torch
from pool import ranks
from torch import nn

pytestmark = pytest.mark.mp

# What the profile says of all-reduces, and how many of four ranks are chosen for it.
FREE, SLOW = 1e-6, 1e6


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x))), x.sum()


def machine(factor):
    """Four one-core nodes where sums cost `factor` times what they do on Haswell-EX."""
    from numadist.costmodel.presets import HASWELL_EX

    sums = {n: {size: factor * us for size, us in t.items()} for n, t in HASWELL_EX.all_reduce_us.items()}
    return replace(HASWELL_EX, all_reduce_us=sums, cores_per_node=1)


@pytest.fixture(scope="module", params=["numa", pytest.param("gloo", marks=pytest.mark.slow)])
def four(request):
    with ranks(4, request.param) as started:
        yield started


def check(rank, world, options):
    """(ranks used, bytes held here, CPUs, threads); raises if an answer is wrong."""
    import os

    import numadist

    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(16, 64)
    affinity = os.sched_getaffinity(0)
    try:
        if "factor" in options:
            options = {**options, "profile": machine(options["factor"])}
            del options["factor"]
        sharded = numadist.shard(model, x, schema=numadist.plan(model, x, **options))
        for seed in (1, 2):
            torch.manual_seed(seed)
            x = torch.randn(16, 64)
            with torch.no_grad():
                for ours, expected in zip(sharded(x), model(x), strict=True):
                    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        return sharded.schema.num_ranks, sharded.local_bytes, torch.get_num_threads()
    finally:
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads(1)


def test_free_sums_use_all_ranks(four):
    answers = four.run(check, {"ranks": "auto", "blocks": "auto", "factor": FREE})
    assert [used for used, _, _ in answers] == [4] * 4
    assert all(held for _, held, _ in answers)


def test_slow_sums_leave_everything_to_rank_0_with_all_threads(four):
    answers = four.run(check, {"ranks": "auto", "blocks": "auto", "factor": SLOW})
    assert [used for used, _, _ in answers] == [1] * 4
    assert [bool(held) for _, held, _ in answers] == [True, False, False, False]
    assert [threads for *_, threads in answers] == [4, 1, 1, 1]


def test_two_of_four_ranks_lead_the_others(four):
    answers = four.run(check, {"ranks": 2})
    assert [bool(held) for _, held, _ in answers] == [True, False, True, False]
    assert [threads for *_, threads in answers] == [2, 1, 2, 1]


def test_slow_sums_leave_blocks_whole_on_all_ranks(four):
    answers = four.run(check, {"blocks": "auto", "factor": SLOW})
    assert [used for used, _, _ in answers] == [4] * 4
    assert len({held for _, held, _ in answers}) == 1, "every rank holds the whole block"


def refused(rank, world, options):
    import numadist
    from numadist.errors import ShardError

    model, x = Stack().eval(), torch.randn(16, 64)
    train = options.pop("train", False)
    try:
        numadist.shard(model, x, schema=numadist.plan(model, x, **options), train=train)
    except ShardError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 3}, "asked for 3 of 4 ranks; possible here: [4, 2, 1]"),
        ({"ranks": "all"}, "ranks='all': expected \"auto\" or a number"),
        ({"blocks": "none"}, "blocks='none': expected \"auto\""),
        ({"ranks": 1, "train": True}, "uses 1 of 4 ranks, which is for inference"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(four, options, words):
    for message in four.run(refused, options):
        assert words in message
