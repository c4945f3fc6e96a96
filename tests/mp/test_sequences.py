"""Random sequences of mixed calls give on our group what they give on Gloo's, bit for bit where Gloo is exact."""

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.mp

# Small integers in every dtype: sums and products are exact, so any order gives the same bits.
DTYPES = ["float32", "float64", "int32", "int64", "uint8"]
KINDS = [
    "all_reduce",
    "all_reduce max",
    "all_reduce async",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "ring",
    "barrier",
]
STEPS = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.one_of(st.integers(0, 70), st.sampled_from([1024, 16384, 16385, 40000])),
    st.integers(0, 10**6),
)


def step(group, rank, world, kind, dtype, n, seed):
    """One call; what it left on this rank."""
    generator = torch.Generator().manual_seed(seed + rank)
    x = torch.randint(0, 3, (n,), generator=generator).to(getattr(torch, dtype))
    root = seed % world
    outs = [torch.zeros_like(x) for _ in range(world)]
    if kind.startswith("all_reduce"):
        op = dist.ReduceOp.MAX if "max" in kind else dist.ReduceOp.SUM
        work = dist.all_reduce(x, op, group=group, async_op="async" in kind)
        if work is not None:
            work.wait()
    elif kind == "reduce":
        dist.reduce(x, root, group=group)
        if rank != root:  # undefined there
            x.zero_()
    elif kind == "broadcast":
        dist.broadcast(x, root, group=group)
    elif kind == "all_gather":
        dist.all_gather(outs, x, group=group)
    elif kind == "gather":
        dist.gather(x, outs if rank == root else None, root, group=group)
    elif kind == "scatter":
        dist.scatter(x, [x + i for i in range(world)] if rank == root else None, root, group=group)
    elif kind == "ring":
        request = dist.isend(x, (rank + 1) % world, group=group, tag=seed % 3)
        dist.recv(outs[0], (rank - 1) % world, group=group, tag=seed % 3)
        request.wait()
    else:
        dist.barrier(group)
    return torch.cat([x, *outs])


_gloo = {}


def run_sequence(rank, world, steps, delays):
    """Steps on our group and on Gloo's; the first step that differs, or None."""
    if world not in _gloo:
        _gloo[world] = dist.new_group(backend="gloo")
    late = random.Random(delays + rank)
    for i, (kind, dtype, n, seed) in enumerate(steps):
        for _ in range(late.choice([0, 0, 100, 20000])):
            pass
        ours = step(None, rank, world, kind, dtype, n, seed)
        gloo = step(_gloo[world], rank, world, kind, dtype, n, seed)
        if not torch.equal(ours, gloo):
            where = (ours != gloo).nonzero()[0].item()
            return f"step {i} {steps[i]}: element {where} is {ours[where]}, on gloo {gloo[where]}"
    return None


def test_random_sequences_equal_gloo(pool):
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(steps=st.lists(STEPS, min_size=1, max_size=12), delays=st.integers(0, 1000))
    def check(steps, delays):
        differences = pool.run(run_sequence, steps, delays)
        assert differences == [None] * pool.world, f"{differences} in {steps}"

    check()
