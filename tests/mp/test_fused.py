"""Operators for compiled graphs: all_reduce with residual and norm in one pass, reduce_scatter, all_gather."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from numadist.errors import CommError

pytestmark = pytest.mark.mp

# Rows within a slot and beyond, blocks whole and not, sums one-shot and two-shot.
SHAPES = [(3, 64), (1, 1001), (2, 3, 576), (700, 576), (3, 40001)]
# Sums of bf16 and f16 may be rounded once more in between, to a step of values below 16.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 7e-2, torch.float16: 8e-3}


def close(seen, wanted, what):
    tolerance = TOLERANCE[seen.dtype]
    torch.testing.assert_close(
        seen, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def inputs(shape, dtype, world):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world + 1)]
    columns = [torch.randn(shape[-1], generator=generator).to(dtype) for _ in range(3)]
    return rows[:-1], rows[-1], *columns


def check_fused(rank, world, dtype):
    name = dist.group.WORLD.group_name
    for shape in SHAPES:
        xs, residual, bias, weight, norm_bias = inputs(shape, dtype, world)
        total = sum(x.float() for x in xs) + residual.float()
        biased = (total + bias.float()).to(dtype)

        y = residual.clone()
        torch.ops.numadist.all_reduce_add_(xs[rank], y, bias, name)
        close(y, biased, f"residual of {shape}")

        y = residual.clone()
        z = torch.ops.numadist.all_reduce_add_norm(xs[rank], y, bias, weight, norm_bias, 1e-5, False, name)
        close(y, biased, f"residual of {shape} with layer norm")
        wanted = F.layer_norm(y.float(), shape[-1:], weight.float(), norm_bias.float(), 1e-5)
        close(z, wanted.to(dtype), f"layer norm of {shape}")

        y = residual.clone()
        z = torch.ops.numadist.all_reduce_add_norm(xs[rank], y, None, weight, None, 1e-5, True, name)
        close(y, total.to(dtype), f"residual of {shape} with RMS norm")
        close(z, F.rms_norm(y.float(), shape[-1:], weight.float(), 1e-5).to(dtype), f"RMS norm of {shape}")
        assert torch.equal(xs[rank], inputs(shape, dtype, world)[0][rank]), "the input is not written"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_reduce_with_bias_residual_and_norm(pool, dtype):
    pool.run(check_fused, dtype)


def fused_step(x, residual, weight, name):
    z = torch.ops.numadist.all_reduce_add_norm(x * 2, residual, None, weight, None, 1e-5, True, name)
    return z + 1, residual * 1


def check_fused_compiled(rank, world):
    name = dist.group.WORLD.group_name
    xs, residual, weight, *_ = inputs((4, 48), torch.float32, world)
    eager = fused_step(xs[rank], residual.clone(), weight, name)
    mutated = residual.clone()
    with torch.no_grad():
        compiled = torch.compile(fused_step, fullgraph=True)(xs[rank], mutated, weight, name)
    for seen, wanted in zip(compiled, eager, strict=True):
        torch.testing.assert_close(seen, wanted)
    torch.testing.assert_close(mutated, eager[1])
    torch._dynamo.reset()


@pytest.mark.slow
def test_fused_op_compiled_by_inductor(pool):
    pool.run(check_fused_compiled)


def check_fused_refuses(rank, world):
    name = dist.group.WORLD.group_name
    x = torch.ones(2, 4)
    with pytest.raises(CommError, match=r"float64 \[2, 4\]"):
        torch.ops.numadist.all_reduce_add_(x.double(), x.double(), None, name)
    with pytest.raises(CommError, match=r"float32 \[3\]"):
        torch.ops.numadist.all_reduce_add_(x, x.clone(), torch.ones(3), name)
    dist.barrier()


def test_fused_op_names_tensors_that_do_not_fit(pool):
    pool.run(check_fused_refuses)


def scatter_and_gather(x, name):
    world = dist.get_world_size()
    part = torch.ops.numadist.reduce_scatter(x * 2, world, name)
    return part, torch.ops.numadist.all_gather(part + 1, world, name)


def check_scatter_and_gather(rank, world, compiled):
    name = dist.group.WORLD.group_name
    run = torch.compile(scatter_and_gather, fullgraph=True) if compiled else scatter_and_gather
    for shape, dtype, in_order in (((2, 5), torch.float32, True), ((3, 7, 300), torch.bfloat16, False)):
        xs = inputs((world * shape[0], *shape[1:]), dtype, world)[0]
        x = xs[rank] if in_order else xs[rank].transpose(0, -1).contiguous().transpose(0, -1)
        with torch.no_grad():
            part, whole = run(x, name)
        total = sum(2 * x.float() for x in xs)
        close(part, total.chunk(world)[rank].to(dtype), f"rank {rank}'s part of {shape}")
        close(whole, (total.to(dtype) + 1), f"all parts of {shape}")
    torch._dynamo.reset()


def test_reduce_scatter_and_all_gather(pool):
    pool.run(check_scatter_and_gather, False)


@pytest.mark.slow
def test_reduce_scatter_and_all_gather_compiled(numa_pair):
    numa_pair.run(check_scatter_and_gather, True)


def check_scatter_refuses(rank, world):
    name = dist.group.WORLD.group_name
    with pytest.raises(CommError, match=f"{world + 1} elements"):
        torch.ops.numadist.reduce_scatter(torch.ones(world + 1), world, name)
    with pytest.raises(CommError, match="must have exactly as many"):
        torch.ops.numadist.all_gather(torch.ones(4), world + 1, name)


def test_rows_that_do_not_split_are_a_clear_error(pool):
    pool.run(check_scatter_refuses)
