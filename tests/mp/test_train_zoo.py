"""Training every architecture of the zoo: gradients and steps are the unsharded model's, on 2, 3 and 4 ranks."""

import sys
from pathlib import Path

import pytest
import torch
from pool import ranks

pytest.importorskip("transformers", reason="needs the extra `models`")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sharding"))
import zoo

pytestmark = pytest.mark.mp

NUM_STEPS = 3
QUICK = ("gpt2", "llama-uneven", "bert")


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda world: f"{world}ranks")
def world(request):
    with ranks(request.param, timeout_s=120.0) as started:
        yield started


def weighted(output):
    """A loss in which every element of the output counts differently."""
    out = zoo.main_output(output).float()
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).sin().view_as(out)
    return (out * weights).sum() / len(out)


def run(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def steps(model, inputs, gradients):
    """Three steps of SGD with momentum; `gradients` gets those of the first."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        weighted(run(model, inputs)).backward()
        if step == 0:
            gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def whole_gradients(sharded):
    """By name, whole. Collective."""
    from numadist.pipeline.whole import gather_whole

    return {
        name: gather_whole(p.grad, sharded.placement(name), sharded.rank, sharded.group)
        for name, p in sharded.local.named_parameters()
        if p.grad is not None
    }


def check(rank, world, name):
    import numadist

    plain, inputs = zoo.make(name), zoo.ZOO[name].inputs()
    inputs = inputs if isinstance(inputs, dict | tuple) else (inputs,)
    sharded = numadist.shard(zoo.make(name), inputs, train=True)
    ours, wanted = {}, {}
    steps(sharded, inputs, lambda m: ours.update(whole_gradients(m)))
    steps(
        plain,
        inputs,
        lambda m: wanted.update(
            {n: p.grad.clone() for n, p in m.named_parameters(remove_duplicate=False) if p.grad is not None}
        ),
    )
    assert ours, "nothing has a gradient"
    for param, grad in ours.items():
        close(grad, wanted[param], f"gradient of {param}", 1e-3, 2e-5)
    state = plain.state_dict()
    for param, value in sharded.state_dict().items():
        close(value, state[param], f"{param} after {NUM_STEPS} steps", 1e-3, 2e-5)
    assert set(wanted) - set(ours) <= set(wanted) - {n for n, _ in sharded.local.named_parameters()}
    return len(sharded.schema.param_shards())


def close(value, wanted, what, rtol, atol):
    scale = wanted.float().abs().max().clamp_min(1.0).item() if wanted.numel() else 1.0
    torch.testing.assert_close(value, wanted, rtol=rtol, atol=atol * scale, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("name", QUICK)
def test_three_steps_are_those_of_the_unsharded_model(world, name):
    assert min(world.run(check, name)) > 4, "the blocks were sharded"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in QUICK])
def test_every_architecture_trains_like_the_unsharded_model(world, name):
    assert min(world.run(check, name)) > 0, "the blocks were sharded"
