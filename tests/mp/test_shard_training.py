"""Training a sharded model: gradients equal the unsharded model's, and tensor parallel composes with DDP."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks

pytest.importorskip("transformers", reason="needs the extra `models`")

pytestmark = pytest.mark.mp

MODELS = {"gpt2-tiny": {}, "llama-tiny": {}, "one-kv-head": {"num_key_value_heads": 1}}


def build(name):
    from numadist import models

    return models.build("llama-tiny" if name == "one-kv-head" else name, **MODELS[name])


def loss_of(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tokens(seed, batch=2, length=9):
    return torch.randint(512, (batch, length), generator=torch.Generator().manual_seed(seed))


def expected_gradients(model, ids):
    model.zero_grad()
    loss = loss_of(model(input_ids=ids, use_cache=False).logits, ids)
    loss.backward()
    return loss.item(), {
        n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None
    }


def check_gradients(rank, world, name):
    import numadist
    from numadist.sharding.placement import Shard
    from numadist.weights.slices import local_slice

    ids, model = tokens(0), build(name)
    sharded = numadist.shard(model, {"input_ids": ids, "use_cache": False}, train=True)
    loss = loss_of(sharded(input_ids=ids).logits, ids)
    loss.backward()
    expected_loss, expected = expected_gradients(model, ids)
    assert abs(loss.item() - expected_loss) < 1e-5
    shards = sharded.schema.param_shards()
    for param, value in sharded.local.named_parameters():
        wanted = local_slice(expected[param], shards.get(param, Shard({})), rank)
        torch.testing.assert_close(
            value.grad, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, p=param: f"{p}: {m}"
        )
    return len(shards)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_the_unsharded_model(group, name):
    assert min(group.run(check_gradients, name)) > 8, "the blocks were sharded"


def check_gathered_gradients(rank, world):
    """The shared KV head's layers computed by parts and gathered."""
    from unittest import mock

    from numadist.sharding import gathered_output as gathered

    with mock.patch.object(gathered, "MIN_FLOPS", 0.0):
        return check_gradients(rank, world, "one-kv-head")


@pytest.mark.slow
def test_gradients_of_gathered_layers(numa_pair):
    plain, by_parts = numa_pair.run(check_gradients, "one-kv-head"), numa_pair.run(check_gathered_gradients)
    assert min(by_parts) > max(plain), "more layers were cut"


def check_tensor_times_data_parallel(rank, world):
    """A 2 x 2 mesh: two replicas of a model over two ranks each, trained three steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    import numadist
    from numadist.sharding.placement import Shard
    from numadist.weights.slices import local_slice

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, tp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    example = {"input_ids": tokens(0), "use_cache": False}
    plain = build("gpt2-tiny")
    sharded = numadist.shard(build("gpt2-tiny"), example, group=mesh.get_group("tp"), train=True)
    model = DistributedDataParallel(sharded, process_group=mesh.get_group("dp"))
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        halves = [tokens(2 * step + i) for i in range(2)]
        ours.zero_grad()
        loss_of(model(input_ids=halves[replica]).logits, halves[replica]).backward()
        ours.step()
        theirs.zero_grad()
        both = torch.cat(halves)
        loss_of(plain(input_ids=both, use_cache=False).logits, both).backward()
        theirs.step()
    wanted, shards = dict(plain.named_parameters(remove_duplicate=False)), sharded.schema.param_shards()
    for name, value in sharded.local.named_parameters():
        part = local_slice(wanted[name].detach(), shards.get(name, Shard({})), tp_rank)
        torch.testing.assert_close(
            value.detach(), part, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
def test_tensor_parallel_times_ddp_trains_like_one_process():
    with ranks(4) as group:
        group.run(check_tensor_times_data_parallel)


def check_compile_is_refused(rank, world):
    import numadist

    with pytest.raises(
        numadist.ShardError, match="compile=True packs weights for inference, train=True changes them"
    ):
        numadist.shard(torch.nn.Linear(2, 2), torch.zeros(1, 2), compile=True, train=True)
    assert dist.is_initialized()


def test_compile_and_train_together_are_refused(group):
    group.run(check_compile_is_refused)
