"""compile_frozen really packs the weights, in one thread and in several at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._inductor.config as inductor_config

from numadist.lowering.freezing import compile_frozen


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """All tests compile Linear.forward, and Dynamo gives up on code it has compiled too often."""
    torch.compiler.reset()


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64).eval()


def follows_its_weight(run, layer: torch.nn.Module) -> bool:
    """Whether a change of the weight after the first call reaches the second: not if it was packed, into a copy."""
    x = torch.randn(32, 64)
    before = run(x)
    with torch.no_grad():
        layer.weight.zero_()
    return not torch.equal(before, run(x))


def test_weights_are_packed_once():
    layer = linear()
    assert not follows_its_weight(compile_frozen(layer), layer)
    assert not inductor_config.freezing, "the global setting must be as before"


def test_the_option_of_torch_compile_does_not_pack():
    """Why compile_frozen exists; when this fails, torch has mended it and the module can go."""
    layer = linear()
    assert follows_its_weight(torch.no_grad()(torch.compile(layer, options={"freezing": True})), layer)


def test_several_threads_compile_at_once():
    layers = [linear() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        follow = list(threads.map(lambda layer: follows_its_weight(compile_frozen(layer), layer), layers))
    assert follow == [False, False]
    assert not inductor_config.freezing


@pytest.mark.parametrize("dynamic", [False, True])
def test_new_sizes_are_packed_too_and_right(dynamic):
    layer = linear()
    run = compile_frozen(layer, dynamic=dynamic)
    for rows in (32, 48, 7):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(run(x), layer(x))


def test_one_shape_keeps_no_unpacked_copy():
    layer = linear()
    x = torch.randn(32, 64)
    truth = layer(x)
    run = compile_frozen(layer, one_shape=True)
    for _ in range(2):
        torch.testing.assert_close(run(x), truth)
    with pytest.raises(RuntimeError, match="discarded for memory efficiency"):
        layer(x)
