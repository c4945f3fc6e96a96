"""Products written for Inductor: same numbers, and the forms its packed kernels recognise."""

import pytest
import torch
from torch.export import Dim

from numadist import models
from numadist.graph.passes import run_passes
from numadist.pipeline import passes
from numadist.pipeline.stages import capture

aten = torch.ops.aten


def targets(gm: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes]


@pytest.mark.parametrize("dynamic", [False, True])
def test_gpt2_has_only_linears_and_gives_the_same_logits(dynamic):
    model = models.build("gpt2-tiny")
    inputs = models.prefill_inputs(model, 2, 16)
    sizes = {"input_ids": {0: Dim("batch", max=64), 1: Dim("seq", max=64)}} if dynamic else None
    gm = capture(model, inputs, sizes).gm
    truth = model(**inputs).logits
    assert aten.addmm.default in targets(gm)
    run_passes(gm, passes.INFERENCE)
    assert aten.addmm.default not in targets(gm)
    assert targets(gm).count(aten.linear.default) == 2 * 4 + 1
    torch.testing.assert_close(gm(**inputs).logits, truth)


def test_the_last_positions_rows_are_copied_together():
    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(8, 16)

        def forward(self, x):
            return self.head(x[:, -1:])

    model, x = Last(), torch.randn(3, 4, 8)
    gm = capture(model, (x,)).gm
    run_passes(gm, passes.INFERENCE)
    assert aten.contiguous.default in targets(gm)
    torch.testing.assert_close(gm(x), model(x))


def test_rows_that_are_viewed_into_other_sizes_stay_an_addmm():
    class Regrouped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 16))
            self.bias = torch.nn.Parameter(torch.randn(16))

        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(4, 3, 16)

    model, x = Regrouped(), torch.randn(3, 4, 8)
    gm = capture(model, (x,)).gm
    run_passes(gm, passes.INFERENCE)
    assert aten.addmm.default in targets(gm)
    torch.testing.assert_close(gm(x), model(x))
