"""Every process plans the same, whatever its hash seed; graphs with writes keep their order."""

import os
import subprocess
import sys

import pytest
import torch

from numadist.pipeline.stages import capture

PLAN = """
from zoo import ZOO, make
from numadist.pipeline.stages import capture
from numadist.sharding.build_schema import build_schema
print(build_schema(capture(make("gemma3"), ZOO["gemma3"].inputs()), 2).to_json())
"""


@pytest.mark.slow
def test_the_hash_seed_does_not_change_the_plan():
    """transformers makes Gemma 3's rotary tables in the order of a set of strings."""
    pytest.importorskip("transformers", reason="needs the extra `models`")
    plans = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        plans.add(
            subprocess.run(
                [sys.executable, "-c", PLAN], env=environment, capture_output=True, check=True
            ).stdout
        )
    assert len(plans) == 1


class Branches(torch.nn.Module):
    def __init__(self, first: int):
        super().__init__()
        self.first = first

    def forward(self, x):
        if self.first:
            a = x.sin()
            b = x.cos()
        else:
            b = x.cos()
            a = x.sin()
        return a - b


def test_independent_branches_come_in_the_order_they_are_needed():
    x = torch.randn(3)
    graphs = [capture(Branches(first), (x,)).gm for first in (0, 1)]
    assert graphs[0].code == graphs[1].code
    for gm in graphs:
        torch.testing.assert_close(gm(x), x.sin() - x.cos())


def test_a_graph_that_writes_keeps_its_order():
    class Writes(torch.nn.Module):
        def forward(self, x):
            y = x.clone()
            before = y.sum()
            y.add_(1)
            return y, before

    x = torch.randn(3)
    y, before = capture(Writes(), (x,)).gm(x)
    torch.testing.assert_close(before, x.sum())
    torch.testing.assert_close(y, x + 1)
