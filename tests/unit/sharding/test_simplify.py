"""Rewrites before planning: what they recognise, what they leave, and that results stay."""

import pytest
import torch
from torch import nn

from numadist.graph.query import aten
from numadist.pipeline.stages import capture

SDPA = aten.scaled_dot_product_attention.default


def attention_of(mask_of, dynamic=False):
    """The captured attention node of a model that masks with mask_of(length, x), and both outputs."""

    class Masked(nn.Module):
        def forward(self, x):
            mask = mask_of(x.shape[2], x)
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(1, 2, 6, 8)
    shapes = {"x": {2: torch.export.Dim.DYNAMIC}} if dynamic else None
    gm = capture(Masked(), (x,), shapes).gm
    (node,) = [n for n in gm.graph.nodes if n.target is SDPA]
    return node, gm(x), Masked()(x)


def causal(length, x):
    i = torch.arange(length)
    return (i[None, :] <= i[:, None])[None, None]


def everything(length, x):
    return torch.ones(length, length, dtype=torch.bool)


def window(length, x):
    i = torch.arange(length)
    return (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 3)


def from_the_input(length, x):
    return (x.sum(dim=(0, 1, 3))[None, :] > -100) & causal(length, x)


@pytest.mark.parametrize(
    ("mask_of", "is_causal", "has_mask"),
    [(causal, True, False), (everything, False, False), (window, False, True), (from_the_input, False, True)],
)
def test_a_mask_known_in_advance_is_named_and_others_are_left(mask_of, is_causal, has_mask):
    node, seen, expected = attention_of(mask_of)
    args = [*node.args, *(None, 0.0, False)[len(node.args) - 3 :]]
    assert bool(args[5]) is is_causal
    assert (args[3] is not None or node.kwargs.get("attn_mask") is not None) is has_mask
    torch.testing.assert_close(seen, expected)


def test_a_mask_of_a_dynamic_length_is_left():
    node, seen, expected = attention_of(causal, dynamic=True)
    assert len(node.args) > 3 or node.kwargs.get("attn_mask") is not None
    torch.testing.assert_close(seen, expected)


class SpelledOut(nn.Module):
    def __init__(self, half=0.5, inner=0.044715):
        super().__init__()
        self.half, self.inner = half, inner

    def forward(self, x):
        scale = (2 / torch.pi) ** 0.5
        return self.half * x * (1.0 + torch.tanh(scale * (x + self.inner * torch.pow(x, 3.0))))


def test_gelu_spelled_out_becomes_one_op_of_the_same_value():
    x = torch.randn(4, 50)
    gm = capture(SpelledOut(), (x,)).gm
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [aten.gelu.default]
    torch.testing.assert_close(gm(x), SpelledOut()(x))


@pytest.mark.parametrize("other", [SpelledOut(half=0.6), SpelledOut(inner=0.05)])
def test_another_formula_is_left(other):
    x = torch.randn(4, 50)
    gm = capture(other, (x,)).gm
    assert aten.gelu.default not in {n.target for n in gm.graph.nodes}
    torch.testing.assert_close(gm(x), other(x))


class Filled(nn.Module):
    """An empty tensor written piece by piece, read between the writes or not."""

    def __init__(self, read_between=False):
        super().__init__()
        self.read_between = read_between

    def forward(self, u, v):
        whole = u.new_empty(3, 12)
        whole[:, :5] = u
        early = whole[:, :5].sum() if self.read_between else 0.0
        whole[:, 5:] = v
        return whole * 2 + early


class FilledOver(nn.Module):
    """Written over the same columns twice."""

    def forward(self, u, v):
        whole = u.new_empty(3, 7)
        whole[:, :5] = u
        whole[:, :7] = v
        return whole * 2


def ops_of(model, *inputs):
    """Operators of the captured graph, after its results were found right."""
    expected = model(*[x.clone() for x in inputs])
    gm = capture(model, tuple(x.clone() for x in inputs)).gm
    torch.testing.assert_close(gm(*[x.clone() for x in inputs]), expected, rtol=0, atol=0)
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def test_a_tensor_filled_piece_by_piece_is_a_concatenation():
    ops = ops_of(Filled(), torch.randn(3, 5), torch.randn(3, 7))
    assert aten.cat.default in ops
    assert aten.copy_.default not in ops


@pytest.mark.parametrize("model", [Filled(read_between=True), FilledOver()])
def test_other_writes_are_left(model):
    ops = ops_of(model, torch.randn(3, 5), torch.randn(3, 7))
    assert aten.copy_.default in ops


class AddedInPlace(nn.Module):
    def __init__(self, read_again):
        super().__init__()
        self.read_again = read_again

    def forward(self, x, y):
        product = x @ x
        first = product[0] if self.read_again else 0.0
        return product.add_(y) + first


@pytest.mark.parametrize("read_again", [False, True])
def test_an_addition_into_fresh_memory_is_a_sum_unless_it_is_read_again(read_again):
    ops = ops_of(AddedInPlace(read_again), torch.randn(4, 4), torch.randn(4))
    assert (aten.add_.Tensor in ops) is read_again


def test_an_addition_into_an_input_is_left():
    class IntoInput(nn.Module):
        def forward(self, x):
            return x.add_(1.0)

    assert aten.add_.Tensor in ops_of(IntoInput(), torch.randn(4))


def test_an_addition_into_what_may_be_another_tensor_is_left():
    class IntoDropout(nn.Module):
        def forward(self, x):
            y = x * 2
            return nn.functional.dropout(y, training=False).add_(1.0) + y

    assert aten.add_.Tensor in ops_of(IntoDropout(), torch.randn(4))
