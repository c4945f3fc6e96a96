"""Every collective against what plain torch computes from all ranks' inputs, which are seeded by rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

pytestmark = pytest.mark.mp

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
OTHERS = [torch.bool, torch.complex64]
# Around a line, around a slot, and beyond several slots.
SIZES = [0, 1, 33, 1000, 16384, 16385, 70001]


def values(rank, num_elements, dtype, seed=0):
    """A rank's input: small integers, so that sums and products are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (num_elements,), generator=generator).to(dtype)


def all_values(world, num_elements, dtype, seed=0):
    return torch.stack([values(rank, num_elements, dtype, seed) for rank in range(world)])


def expect(seen, wanted, what):
    assert seen.dtype == wanted.dtype, f"{what}: {seen.dtype} instead of {wanted.dtype}"
    different = (seen != wanted).nonzero()
    assert len(different) == 0, (
        f"{what}: {len(different)} of {seen.numel()} differ, first at {different[0].tolist()}: "
        f"{seen[tuple(different[0])]} instead of {wanted[tuple(different[0])]}"
    )


def expected_sum(world, n, dtype):
    stacked = all_values(world, n, dtype)
    return stacked.any(0) if dtype == torch.bool else stacked.sum(0).to(dtype)


def check_sum(rank, world, dtype):
    for n in SIZES:
        x = values(rank, n, dtype)
        dist.all_reduce(x)
        expect(x, expected_sum(world, n, dtype), f"all_reduce of {n} {dtype}")


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + OTHERS, ids=str)
def test_all_reduce_sums_every_dtype_and_size(pool, dtype):
    pool.run(check_sum, dtype)


REFERENCES = {
    "PRODUCT": lambda x: x.to(torch.float64).prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    "AVG": lambda x: x.to(torch.float64).mean(0),
    "BAND": lambda x: _fold(x, torch.bitwise_and),
    "BOR": lambda x: _fold(x, torch.bitwise_or),
    "BXOR": lambda x: _fold(x, torch.bitwise_xor),
}


def _fold(x, function):
    total = x[0]
    for row in x[1:]:
        total = function(total, row)
    return total


def check_op(rank, world, name, dtype):
    for n in (1, 33, 20001):
        x = values(rank, n, dtype)
        dist.all_reduce(x, getattr(ReduceOp, name))
        expect(x, REFERENCES[name](all_values(world, n, dtype)).to(dtype), f"{name} of {n} {dtype}")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["PRODUCT", "MIN", "MAX"])
def test_all_reduce_products_and_extremes(pool, name, dtype):
    pool.run(check_op, name, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_reduce_average_rounds_once(pool, dtype):
    pool.run(check_op, "AVG", dtype)


@pytest.mark.parametrize("name", ["BAND", "BOR", "BXOR"])
def test_all_reduce_bits(pool, name):
    pool.run(check_op, name, torch.int32)


def sum_of_randn(rank, world, dtype):
    x = torch.randn(50001, generator=torch.Generator().manual_seed(rank)).to(dtype)
    dist.all_reduce(x)
    return x.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy().copy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_ranks_get_the_same_bits_summed_in_rank_order(pool, dtype):
    results = [torch.from_numpy(bits).view(dtype) for bits in pool.run(sum_of_randn, dtype)]
    total = torch.zeros(50001)
    for rank in range(pool.world):
        total += torch.randn(50001, generator=torch.Generator().manual_seed(rank)).to(dtype).float()
    for rank, result in enumerate(results):
        expect(result, total.to(dtype), f"rank {rank}")


def check_views(rank, world):
    wanted = expected_sum(world, 600, torch.float32)
    strided = torch.full((600, 2), -1.0)
    strided[:, 0] = values(rank, 600, torch.float32)
    dist.all_reduce(strided[:, 0])
    expect(strided[:, 0], wanted, "strided view")
    expect(strided[:, 1], torch.full((600,), -1.0), "its neighbours")
    transposed = values(rank, 600, torch.float32).view(20, 30).t()
    dist.all_reduce(transposed)
    expect(transposed.t().reshape(-1), wanted, "transposed view")
    raw = bytearray(4 * 600 + 1)
    misaligned = torch.frombuffer(raw, dtype=torch.float32, offset=1)
    misaligned.copy_(values(rank, 600, torch.float32))
    dist.all_reduce(misaligned)
    expect(misaligned.clone(), wanted, "misaligned view")


def test_views_are_reduced_in_place(pool):
    pool.run(check_views)


def check_gathers(rank, world, dtype):
    for n in SIZES:
        x, wanted = values(rank, n, dtype), all_values(world, n, dtype)
        outs = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(outs, x)
        expect(torch.stack(outs), wanted, f"all_gather of {n} {dtype}")
        whole = torch.empty(world * n, dtype=dtype)
        dist.all_gather_into_tensor(whole, x)
        expect(whole, wanted.reshape(-1), f"all_gather_into_tensor of {n} {dtype}")
        for root in range(world):
            outs = [torch.empty_like(x) for _ in range(world)] if rank == root else None
            dist.gather(x, outs, dst=root)
            if rank == root:
                expect(torch.stack(outs), wanted, f"gather of {n} {dtype} to {root}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_gathers(pool, dtype):
    pool.run(check_gathers, dtype)


def check_scatters(rank, world, dtype):
    for n in SIZES:
        parts = [values(rank, n, dtype, seed=part) for part in range(world)]
        wanted = all_values(world, n, dtype, seed=rank).sum(0).to(dtype)
        y = torch.empty(n, dtype=dtype)
        dist.reduce_scatter(y, parts)
        expect(y, wanted, f"reduce_scatter of {n} {dtype}")
        y = torch.empty(n, dtype=dtype)
        dist.reduce_scatter_tensor(y, torch.cat(parts))
        expect(y, wanted, f"reduce_scatter_tensor of {n} {dtype}")
        for root in range(world):
            dist.scatter(y, parts if rank == root else None, src=root)
            expect(y, values(root, n, dtype, seed=rank), f"scatter of {n} {dtype} from {root}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_scatters(pool, dtype):
    pool.run(check_scatters, dtype)


def check_rooted(rank, world, dtype):
    for n in SIZES:
        for root in range(world):
            x = values(rank, n, dtype)
            dist.broadcast(x, src=root)
            expect(x, values(root, n, dtype), f"broadcast of {n} {dtype} from {root}")
            x = values(rank, n, dtype)
            dist.reduce(x, dst=root)
            if rank == root:
                expect(x, all_values(world, n, dtype).sum(0).to(dtype), f"reduce of {n} {dtype} to {root}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8], ids=str)
def test_broadcast_and_reduce(pool, dtype):
    pool.run(check_rooted, dtype)


def check_all_to_all(rank, world):
    # Rank s sends (s + 2 d) mod 3 rows to rank d.
    def rows(sender, receiver):
        return (sender + 2 * receiver) % 3

    ins = torch.arange(sum(rows(rank, d) for d in range(world)) * 5).view(-1, 5) + 1000 * rank
    in_splits, out_splits = [rows(rank, d) for d in range(world)], [rows(s, rank) for s in range(world)]
    outs = torch.empty(sum(out_splits), 5, dtype=torch.int64)
    dist.all_to_all_single(outs, ins, out_splits, in_splits)
    wanted = []
    for s in range(world):
        sent = torch.arange(sum(rows(s, d) for d in range(world)) * 5).view(-1, 5) + 1000 * s
        wanted.append(sent.split([rows(s, d) for d in range(world)])[rank])
    expect(outs, torch.cat(wanted), "all_to_all_single with uneven splits")
    big = torch.arange(world * 30000) + rank
    out = torch.empty_like(big)
    dist.all_to_all_single(out, big)
    expect(
        out, torch.cat([big.chunk(world)[rank] - rank + s for s in range(world)]), "even all_to_all_single"
    )


def test_all_to_all(pool):
    pool.run(check_all_to_all)


def check_objects(rank, world):
    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (10 + 1000 * rank)})
    assert [o["rank"] for o in everyone] == list(range(world))
    objects = ["root", 3, None] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(objects, src=1)
    assert objects == ["root", 3, None]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    dist.barrier()


def test_object_collectives(pool):
    pool.run(check_objects)


def check_async(rank, world):
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    assert work.is_completed()
    expect(work.get_future().wait()[0], torch.full((1000,), float(world)), "future of an async all_reduce")


def test_async_op_gives_work_and_future(pool):
    pool.run(check_async)


def check_subgroups(rank, world):
    pairs = [dist.new_group([0, last]) for last in range(1, world)]
    for last, group in enumerate(pairs, 1):
        if rank in (0, last):
            x = torch.tensor([rank + 1.0])
            dist.all_reduce(x, group=group)
            assert x.item() == last + 2, f"group of 0 and {last}: {x.item()}"
            dist.destroy_process_group(group)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == world, "the default group goes on"


def test_overlapping_subgroups(pool):
    pool.run(check_subgroups)


def check_stats(rank, world):
    from numadist.comm.registry import stats

    stats(reset=True)
    for _ in range(5):
        dist.all_reduce(torch.ones(10))
    seen = stats()
    assert seen.num_calls == 5, f"5 calls, counted {seen.num_calls}"
    assert 0 <= seen.wait_ns <= seen.total_ns, f"{seen}"
    assert seen.total_ns > 0, f"{seen}"


def test_counters_of_a_group(pool):
    pool.run(check_stats)


def check_sparse(rank, world):
    x = torch.zeros(6, 4)
    x[rank] = rank + 1.0
    x[5] = 1.0
    sparse = x.to_sparse()
    dist.all_reduce(sparse)
    wanted = torch.zeros(6, 4)
    wanted[:world] = torch.arange(1.0, world + 1)[:, None]
    wanted[5] = world
    expect(sparse.to_dense(), wanted, "sum of sparse tensors")


def test_sparse_tensors_are_summed(pool):
    pool.run(check_sparse)


def check_unsupported(rank, world):
    from numadist.errors import CommError

    for tensor, op, word in [
        (torch.ones(2, dtype=torch.int32), ReduceOp.AVG, "AVG"),
        (torch.ones(2), ReduceOp.BAND, "BAND"),
        (torch.ones(2).to(torch.float8_e4m3fn), ReduceOp.SUM, "float8_e4m3fn"),
        (torch.ones(2).to_sparse(), ReduceOp.MAX, "sparse"),
        (torch.ones(2, device="meta"), ReduceOp.SUM, "meta"),
    ]:
        with pytest.raises(CommError, match=word):
            dist.all_reduce(tensor, op)
    dist.barrier()  # none of them broke the group


def test_what_has_no_meaning_is_refused_by_name(pool):
    pool.run(check_unsupported)
