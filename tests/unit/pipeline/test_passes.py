"""Passes say what they need and leave; a run holds them to it where it is asked to."""

import pytest
import torch
from torch.fx import GraphModule

from numadist.graph import facts
from numadist.graph.capture import export
from numadist.graph.passes import Fact, Pass, checking, run_passes
from numadist.pipeline import passes
from numadist.pipeline.stages import capture

aten = torch.ops.aten
LISTS = {name: value for name, value in vars(passes).items() if name.isupper() and not name.startswith("_")}


class Attention(torch.nn.Module):
    """KV heads repeated as Hugging Face does, GELU spelled out, a write into a fresh tensor, a cast of nothing."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = (torch.nn.Linear(16, n) for n in (16, 8, 16))

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in self._kv(x))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        return self.out(y.to(torch.float32)).sin().add_(x)

    def _kv(self, x):
        kv = self.kv(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return kv, kv.cos()


def test_a_captured_graph_has_all_facts_that_its_passes_leave():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 16)
    raw, gm = export(model, x).gm, capture(model, x).gm
    for fact in (facts.NO_SPELLED_GELU, facts.FUNCTIONAL, facts.NO_NOISE):
        assert fact.violation(raw), f"{fact.name!r} holds before any pass: the model tests nothing"
        assert not fact.violation(gm)
    assert not facts.SIZED.violation(gm)
    assert not facts.CANONICAL.violation(gm)
    run_passes(gm, passes.STEP)
    assert not facts.KV_NOT_REPEATED.violation(gm)
    assert not facts.ANY_SHAPE.violation(gm)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("name", LISTS)
def test_every_pass_says_what_it_does(name):
    for step in LISTS[name]:
        assert step.does, step.name
        assert step.needs or step.leaves or step.keeps, f"{step.name} says nothing that could be checked"


def swapped() -> GraphModule:
    """A graph that is in no canonical order."""

    class Two(torch.nn.Module):
        def forward(self, x):
            b, a = x.cos(), x.sin()
            return a - b

    return export(Two(), torch.ones(3)).gm


def test_a_pass_that_leaves_what_it_should_not_is_caught():
    lies = Pass(lambda gm: None, "nothing", leaves=(facts.CANONICAL,))
    run_away = Pass(lambda gm: None, "nothing", needs=(facts.CANONICAL,))
    with checking():
        with pytest.raises(AssertionError, match="should leave 'one order and one naming'"):
            run_passes(swapped(), [lies])
        with pytest.raises(AssertionError, match="needs 'one order and one naming'"):
            run_passes(swapped(), [run_away])


def test_a_pass_must_keep_what_it_says_it_keeps_only_if_it_was_there():
    def forget(gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            node.meta.pop("val", None)

    gm = swapped()
    with checking(), pytest.raises(AssertionError, match="should keep 'the value of every op is known'"):
        run_passes(gm, [Pass(forget, "forgets sizes", keeps=(facts.SIZED,))])
    with checking():
        run_passes(gm, [Pass(lambda gm: None, "nothing", keeps=(facts.SIZED,))])


def test_facts_are_not_looked_at_otherwise(monkeypatch):
    from numadist.graph import passes as framework

    monkeypatch.setattr(framework, "_checks", False)
    never = Fact("never looked at", lambda gm: pytest.fail("looked at"))
    run_passes(swapped(), [Pass(lambda gm: None, "nothing", needs=(never,), leaves=(never,), keeps=(never,))])
