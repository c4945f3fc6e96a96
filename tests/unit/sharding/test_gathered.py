"""Layers that no block takes are computed by parts and gathered, where that is worth it."""

import pytest
import torch
from lockstep import run_all, shard_all
from torch import nn
from torch.export import Dim

from numadist.sharding import gathered_output as gathered


class OneKvHead(nn.Module):
    """Attention with four query heads over one key and value head, as in Gemma 3 and Falcon."""

    def __init__(self, width: int = 256, head: int = 64, bias: bool = True):
        super().__init__()
        self.head = head
        self.q, self.o = nn.Linear(width, 4 * head, bias), nn.Linear(4 * head, width, bias)
        self.k, self.v = nn.Linear(width, head, bias), nn.Linear(width, head, bias)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, self.head).transpose(1, 2)
        k, v = (
            layer(x).view(batch, length, 1, self.head).transpose(1, 2).expand(-1, 4, -1, -1)
            for layer in (self.k, self.v)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(out.transpose(1, 2).reshape(batch, length, -1))


def gathered_layers(schema):
    return sorted(block.module for block in schema.blocks if block.kind == "gathered output")


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_shared_kv_head_is_computed_by_parts(num_ranks, bias):
    torch.manual_seed(0)
    model, x = OneKvHead(bias=bias).eval(), torch.randn(2, 512, 256)
    schema, graphs, board = shard_all(model, x, num_ranks)
    assert gathered_layers(schema) == ["k", "v"]
    assert not schema.left_alone
    parameters = dict(graphs[0].named_parameters())
    assert parameters["k.weight"].shape[0] < 64
    expected = model(x)
    for out in run_all(graphs, x, board):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_little_work_and_dynamic_sizes_are_left_alone():
    torch.manual_seed(0)
    model = OneKvHead().eval()
    schema, _, _ = shard_all(model, torch.randn(1, 8, 256), 2)
    assert gathered_layers(schema) == []
    assert {entry.module for entry in schema.left_alone} == {"k", "v"}
    schema, _, _ = shard_all(model, torch.randn(2, 512, 256), 2, ({1: Dim("length", max=1024)},))
    assert gathered_layers(schema) == []


def test_a_weight_used_twice_is_left_alone(monkeypatch):
    monkeypatch.setattr(gathered, "MIN_FLOPS", 0.0)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(128, 128), nn.LayerNorm(128)

        def forward(self, x):
            return self.norm(self.layer(self.norm(self.layer(x))))

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(4, 128)
    schema, graphs, board = shard_all(model, x, 2)
    assert gathered_layers(schema) == []
    torch.testing.assert_close(run_all(graphs, x, board)[1], model(x))
