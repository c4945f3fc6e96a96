"""torch on top of the group: functional collectives, compiled graphs, DeviceMesh, DTensor, DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.mp


def check_functional(rank, world):
    from torch.distributed import _functional_collectives as funcol

    x = torch.full((5,), rank + 1.0)
    total = world * (world + 1) / 2
    assert torch.equal(funcol.all_reduce(x, "sum", dist.group.WORLD), torch.full((5,), total))
    gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    assert torch.equal(gathered, torch.arange(1.0, world + 1).repeat_interleave(5))
    scattered = funcol.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
    assert torch.equal(scattered, world * x)


def test_functional_collectives_eager(pool):
    pool.run(check_functional)


def check_compiled_functional(rank, world):
    from torch.distributed import _functional_collectives as funcol

    @torch.compile(fullgraph=True)
    def step(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    x = torch.full((64,), rank + 1.0)
    assert torch.equal(step(x), torch.full((64,), world * (world + 1) + 1.0))


@pytest.mark.slow
def test_functional_collectives_compiled(pool):
    pool.run(check_compiled_functional)


def custom_op_step(w_FD, x_D, name):
    y_partial_F = w_FD @ x_D
    torch.ops.numadist.all_reduce_(y_partial_F, name)
    return torch.relu(y_partial_F) + 1


def check_custom_op(rank, world, freezing):
    import torch._inductor.config as inductor

    name = dist.group.WORLD.group_name
    w_FD, x_D = torch.eye(48) * (rank + 1), torch.arange(48.0)
    wanted = x_D * (world * (world + 1) / 2) + 1
    assert torch.equal(custom_op_step(w_FD, x_D, name), wanted)
    with inductor.patch(freezing=freezing), torch.no_grad():
        compiled = torch.compile(custom_op_step, fullgraph=True)
        for _ in range(3):
            seen = compiled(w_FD, x_D, name)
            assert torch.equal(seen, wanted), f"{seen} instead of {wanted}"
    torch._dynamo.reset()


@pytest.mark.parametrize("freezing", [False, True])
def test_custom_op_compiled_by_inductor(pool, freezing):
    pool.run(check_custom_op, freezing)


def check_mesh(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(world * 6.0).view(world * 2, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert sharded.to_local().shape == (2, 3)
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)


def test_device_mesh_and_dtensor(pool):
    pool.run(check_mesh)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))


def check_tensor_parallel(rank, world, compiled):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x, plain = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)), mlp()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(), init_device_mesh("cpu", (world,)), plan)
    if compiled:
        model = torch.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_column_and_row_parallel_linear_layers(pool, compiled):
    pool.run(check_tensor_parallel, compiled)


def check_ddp(rank, world):
    from torch.nn.parallel import DistributedDataParallel

    x_all = torch.randn(world, 4, 12, generator=torch.Generator().manual_seed(2))
    plain, model = mlp(), DistributedDataParallel(mlp())
    plain(x_all.view(-1, 12)).square().mean().backward()
    model(x_all[rank]).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=f"gradient of {name}")


def test_ddp_gradients_equal_those_of_one_process(pool):
    pool.run(check_ddp)


def check_coalesced(rank, world):
    xs = [torch.full((n,), float(rank)) for n in (3, 70000)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for x in xs:
        assert torch.equal(x, torch.full_like(x, world * (world - 1) / 2))


def test_coalescing_manager(pool):
    pool.run(check_coalesced)


def test_importing_torch_registers_the_backend_without_loading_numadist_comm(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys, torch, torch.distributed as dist; "
        "assert dist.Backend.NUMA == 'numa'; "
        "print([m for m in sys.modules if m.startswith('numadist')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "_native" not in out.stdout, out.stdout
    assert "numadist.comm.register" in out.stdout, out.stdout


def check_split(rank, world):
    whole = dist.group.WORLD
    # Each rank alone but the first two, which make a group in turned order.
    for ranks in ([1, 0], *([r] for r in range(2, world))):
        part = whole.split_group(ranks)
        assert (part is not None) == (rank in ranks), f"{ranks}: {part}"
        if part is None:
            continue
        assert (part.rank(), part.size()) == (ranks.index(rank), len(ranks))
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=part)
        assert x.item() == sum(ranks), f"{ranks}: {x}"
        part.shutdown()
    dist.barrier()


def test_split_group_makes_groups_of_parts(pool):
    pool.run(check_split)
