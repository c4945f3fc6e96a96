"""DDP, FSDP2 and tensor parallelism train to the same loss on our group as on Gloo's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.mp

NUM_STEPS = 50


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 4))


def ddp(model, mesh):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, process_group=mesh.get_group())


def fsdp2(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def losses(wrap, mesh, data_rank, compiled):
    """The loss of every step; ranks that share the model's weights see the same data."""
    model = wrap(mlp(), mesh)
    if compiled:
        torch._dynamo.reset()
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(7 + data_rank)
    x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 4, generator=generator)
    found = []
    for _ in range(NUM_STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


_meshes = {}


def train(rank, world, name, compiled):
    from torch.distributed.device_mesh import DeviceMesh

    if world not in _meshes:
        gloo = dist.new_group(backend="gloo")
        _meshes[world] = [DeviceMesh.from_group(group, "cpu") for group in (dist.group.WORLD, gloo)]
    wrap = {"ddp": ddp, "fsdp2": fsdp2, "tensor_parallel": tensor_parallel}[name]
    data_rank = 0 if name == "tensor_parallel" else rank
    return [losses(wrap, mesh, data_rank, compiled) for mesh in _meshes[world]]


def check_learns_as_on_gloo(pool, name, compiled):
    for rank, (ours, gloo) in enumerate(pool.run(train, name, compiled)):
        assert ours[-1] < 0.9 * ours[0], f"rank {rank} does not learn: {ours[0]} to {ours[-1]}"
        assert ours == pytest.approx(gloo, rel=1e-4), f"rank {rank}: {ours[-1]} on ours, {gloo[-1]} on gloo"


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel"])
def test_50_steps_give_the_losses_of_gloo(pool, name):
    check_learns_as_on_gloo(pool, name, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel"])
def test_50_compiled_steps_give_the_losses_of_gloo(numa_pair, name):
    check_learns_as_on_gloo(numa_pair, name, compiled=True)
