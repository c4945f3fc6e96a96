"""Groups over several machines: every call gives what Gloo gives. Machines are told apart by NUMADIST_MACHINE here;
test_launch_machines.py has two of them in network namespaces."""

import re

import pytest
import torch
import torch.distributed as dist
from pool import ranks

from numadist.errors import CollectiveMismatch, CommError, PeerLost

pytestmark = pytest.mark.mp

DTYPES = ["float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "int64", "bool", "complex64"]


@pytest.fixture(scope="module", params=[pytest.param("aabb", marks=pytest.mark.slow), "aba"])
def pool(request):
    """Two and two ranks, two and one."""
    with ranks(len(request.param), machines=request.param) as started:
        yield started


def values(n, dtype, seed):
    """Small integers: any order of sums gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (n,), generator=generator).to(getattr(torch, dtype))


def all_values(n, dtype, seed, world):
    return [values(n, dtype, seed + rank) for rank in range(world)]


def equal(seen, wanted, what):
    assert seen.dtype == wanted.dtype
    assert torch.equal(seen, wanted), f"{what}: {seen} instead of {wanted}"


def check_reductions(rank, world):
    for n in (0, 1, 3, 1000, 70_001):
        for dtype in DTYPES:
            all_x = all_values(n, dtype, n, world)
            wanted = torch.stack(all_x).sum(0).to(all_x[0].dtype)
            x = all_x[rank].clone()
            dist.all_reduce(x)
            equal(x, wanted, f"all_reduce of {n} {dtype}")
            for root in range(world):
                x = all_x[rank].clone()
                dist.reduce(x, root)
                equal(x, wanted if rank == root else all_x[rank], f"reduce of {n} {dtype} to {root}")
            ins = [all_x[rank] for _ in range(world)]
            y = torch.empty_like(all_x[0])
            dist.reduce_scatter(y, ins)
            equal(y, wanted, f"reduce_scatter of {n} {dtype}")
    x = torch.tensor([rank + 1.0, -rank])
    for op, wanted in (
        (dist.ReduceOp.MAX, [world, 0]),
        (dist.ReduceOp.MIN, [1, 1 - world]),
        (dist.ReduceOp.AVG, [(world + 1) / 2, (1 - world) / 2]),
    ):
        y = x.clone()
        dist.all_reduce(y, op)
        equal(y, torch.tensor(wanted, dtype=torch.float32), f"all_reduce {op}")


def check_movers(rank, world):
    for n in (0, 1, 7, 50_000):
        for dtype in ("float32", "bfloat16", "int16", "complex128", "float8_e4m3fn"):
            all_x = [(v.float() * (r + 1)).to(v.dtype) for r, v in enumerate(all_values(n, dtype, n, world))]
            outs = [torch.empty_like(x) for x in all_x]
            dist.all_gather(outs, all_x[rank])
            for r, out in enumerate(outs):
                equal(
                    out.view(torch.uint8), all_x[r].view(torch.uint8), f"all_gather of {n} {dtype} from {r}"
                )
            for root in range(world):
                x = all_x[rank].clone()
                dist.broadcast(x, root)
                equal(
                    x.view(torch.uint8),
                    all_x[root].view(torch.uint8),
                    f"broadcast of {n} {dtype} from {root}",
                )
                dist.gather(all_x[rank], outs if rank == root else None, root)
                x = torch.empty_like(all_x[0])
                dist.scatter(x, all_x if rank == root else None, root)
                equal(
                    x.view(torch.uint8), all_x[rank].view(torch.uint8), f"scatter of {n} {dtype} from {root}"
                )
    rows = torch.arange(float(2 * world)) + 100 * rank
    y = torch.empty(2 * world)
    dist.all_to_all_single(y, rows)
    wanted = torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(world)])
    equal(y, wanted, "all_to_all_single")
    # Rank r sends r + 1 elements to each.
    outs = [torch.empty(r + 1) for r in range(world)]
    dist.all_to_all(outs, [torch.full((rank + 1,), float(rank))] * world)
    for r, out in enumerate(outs):
        equal(out, torch.full((r + 1,), float(r)), f"all_to_all from {r}")


def check_messages_and_background(rank, world):
    x = torch.full((1000,), float(rank))
    y = torch.empty(1000)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    request = dist.isend(x, (rank + 1) % world, tag=3)
    dist.recv(y, (rank - 1) % world, tag=3)
    request.wait()
    equal(y, torch.full((1000,), float((rank - 1) % world)), "ring")
    work.wait()
    sums = [torch.full((5,), float(i)) for i in range(20)]
    works = [dist.all_reduce(s, async_op=True) for s in sums]
    futures = [w.get_future() for w in works]
    for i, future in enumerate(futures):
        equal(future.wait()[0], torch.full((5,), float(i * world)), f"background call {i}")
    strided = torch.ones(8, 2)[:, 0]
    dist.all_reduce(strided)
    equal(strided, torch.full((8,), float(world)), "strided all_reduce")
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(world))
    dist.barrier()


def check_fused(rank, world):
    group = dist.group.WORLD
    x = torch.arange(12.0).view(3, 4) * (rank + 1)
    residual, bias, weight = torch.ones(3, 4), torch.full((4,), 2.0), torch.full((4,), 0.5)
    out = torch.ops.numadist.all_reduce_add_norm(
        x, residual, bias, weight, None, 1e-6, True, group.group_name
    )
    y = torch.arange(12.0).view(3, 4) * (world * (world + 1) // 2) + 3
    equal(residual, y, "residual")
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(y, (4,), weight, 1e-6))


def check_num_open(rank, world):
    from numadist.comm.registry import num_open

    other, x = dist.new_group(), torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(x, group=other, async_op=True)
        assert num_open() == 1, "the others have not come"
    dist.barrier()
    if rank != 0:
        dist.all_reduce(x, group=other)
    else:
        work.wait()
        assert num_open() == 0
    dist.destroy_process_group(other)


@pytest.mark.parametrize(
    "check", [check_reductions, check_movers, check_messages_and_background, check_fused, check_num_open]
)
def test_calls_over_machines(pool, check):
    pool.run(check)


def same_bits(rank, world):
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(rank)).bfloat16()
    dist.all_reduce(x)
    return x.view(torch.int16).tolist()


def test_all_ranks_get_the_same_bits(pool):
    seen = pool.run(same_bits)
    assert all(bits == seen[0] for bits in seen)


def kinds_of_groups(rank, world):
    """Groups of each machine's own ranks, and of all: the kind of each, and a sum in it."""
    local = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = local[rank // 2]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    pair = dist.new_group([0, 2])
    return type(dist.group.WORLD).__name__, type(mine).__name__, x.item(), type(pair).__name__


def test_a_group_inside_one_machine_is_pure_shared_memory():
    with ranks(4, machines="aabb") as pool:
        seen = pool.run(kinds_of_groups)
    for rank, (whole, mine, total, pair) in enumerate(seen):
        assert (whole, mine, total) == ("MachinesGroup", "ShmGroup", 1.0 if rank < 2 else 5.0), f"rank {rank}"
        assert pair == ("MachinesGroup" if rank in (0, 2) else "int"), f"rank {rank}: {pair}"


def failing_call(rank, world, make):
    try:
        make(rank)
    except CommError as error:
        return type(error).__name__, str(error)
    return None


def different_calls(rank):
    dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(5), 0)


def test_different_calls_on_two_machines_name_both_sides():
    with ranks(2, machines="ab") as pool:
        for kind, text in pool.run(failing_call, different_calls):
            assert kind == CollectiveMismatch.__name__, text
            assert len(re.findall(r"rank \d called (?:all_reduce|broadcast)\(", text)) == 2, text


def call_for_ever(rank):
    while True:
        dist.all_reduce(torch.ones(100))


def abort_or_call(rank, world):
    if rank != 2:
        return failing_call(rank, world, call_for_ever)
    for _ in range(10):
        dist.all_reduce(torch.ones(100))
    dist.group.WORLD.abort()
    return failing_call(rank, world, call_for_ever)


def test_abort_ends_the_calls_on_all_machines():
    with ranks(3, machines="aab") as pool:
        for rank, answer in enumerate(pool.run(abort_or_call)):
            assert answer is not None, f"rank {rank} went on"
            assert rank != 2 or "was aborted by rank 2" in answer[1], answer


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_an_error_on_all_machines_long_before_the_deadline(victim):
    survivors = [rank for rank in range(3) if rank != victim]
    # A deadline that this test does not live to see.
    with ranks(3, machines="aab", timeout_s=1e5) as pool:
        for rank in range(3):
            pool.send(rank, failing_call, call_for_ever)
        pool.processes[victim].kill()
        pool.processes[victim].join()
        kinds = [kind for kind, _ in pool.answers(survivors)]
        assert PeerLost.__name__ in kinds, kinds
