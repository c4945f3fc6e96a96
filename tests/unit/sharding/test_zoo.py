"""Every architecture x rank count x dtype x fixed or dynamic shapes: sharded equals unsharded."""

from collections import Counter

import pytest
import torch
from lockstep import local_fraction, run_all, shard_all

from numadist import inprocess

pytest.importorskip("transformers", reason="needs the extra `models`")

from zoo import ZOO, main_output, make

MAX_ERROR = 1e-5  # of the output's scale, fp32
MAX_BF16_RATIO = 1.5  # error against the fp32 truth, of the unsharded bf16 model's


def quick_ones(names):
    """All names; those that `make test` leaves out where it runs every model in another way are slow."""
    return [pytest.param(n, marks=[] if n in ("gpt2", "llama") else pytest.mark.slow) for n in names]


def compare(name, model, truth, inputs, graphs, board):
    """Largest error of any rank and of the unsharded model against `truth`, as shares of the truth's scale."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        unsharded = main_output(model(*args, **kwargs)).float()
    scale = truth.abs().max()
    outputs = [main_output(out).float() for out in run_all(graphs, inputs, board)]
    assert all(torch.equal(out, outputs[0]) for out in outputs), f"{name}: ranks differ in bits"
    ours = ((outputs[0] - truth).abs().max() / scale).item()
    return ours, ((unsharded - truth).abs().max() / scale).item()


def truth_of(model, inputs):
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        return main_output(model(*args, **kwargs)).float()


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ZOO)
def test_fp32_fixed_shapes(name, num_ranks):
    entry, model = ZOO[name], make(name)
    inputs = entry.inputs()
    schema, graphs, board = shard_all(model, inputs, num_ranks)
    ours, _ = compare(name, model, truth_of(model, inputs), inputs, graphs, board)
    assert ours < MAX_ERROR, f"{name} at {num_ranks} ranks: error {ours:.1e} of the output's scale"
    if num_ranks == 2:
        kinds: dict[str, int] = {}
        for block in schema.blocks:
            kinds[block.kind] = kinds.get(block.kind, 0) + 1
        assert kinds == entry.kinds, [(e.module, e.reason) for e in schema.left_alone]
        assert {e.module for e in schema.left_alone} == set(entry.left_alone)
    else:
        assert local_fraction(graphs, model) < 1


@pytest.mark.parametrize("name", quick_ones(n for n in ZOO if ZOO[n].dynamic))
def test_dynamic_batch_and_sequence(name):
    entry, model = ZOO[name], make(name)
    _, graphs, board = shard_all(model, entry.inputs(), 2, entry.dynamic)
    for inputs in (entry.inputs(), entry.longer()):
        ours, _ = compare(name, model, truth_of(model, inputs), inputs, graphs, board)
        assert ours < MAX_ERROR, f"{name}: error {ours:.1e} of the output's scale"


@pytest.mark.parametrize("name", quick_ones(ZOO))
def test_bf16_is_no_further_from_fp32_than_the_unsharded_model(name):
    entry = ZOO[name]
    inputs = entry.inputs()
    if not isinstance(inputs, dict) or any(
        v.is_floating_point() for v in inputs.values() if torch.is_tensor(v)
    ):
        inputs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, inputs
        )
    model = make(name).bfloat16()
    truth = truth_of(
        make(name).bfloat16().float(),
        torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, inputs
        ),
    )
    schema, graphs, board = shard_all(model, inputs, 2)
    assert Counter(block.kind for block in schema.blocks) == entry.kinds, "as many blocks as in fp32"
    ours, unsharded = compare(name, model, truth, inputs, graphs, board)
    assert ours <= MAX_BF16_RATIO * unsharded, f"{name}: bf16 error {ours:.2e}, unsharded {unsharded:.2e}"


@pytest.mark.parametrize("name", ZOO)
def test_in_process_variant(name):
    entry, model = ZOO[name], make(name)
    inputs = entry.inputs()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    truth = truth_of(model, inputs)
    split = inprocess.shard(model, inputs, nodes=2)
    try:
        error = (main_output(split(*args, **kwargs)).float() - truth).abs().max() / truth.abs().max()
    finally:
        split.close()
    assert error.item() < MAX_ERROR, f"{name}: error {error:.1e} of the output's scale"
