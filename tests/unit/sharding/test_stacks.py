"""Random stacks of attention and MLP blocks: whatever the planner decides, the answer is the unsharded model's."""

import hypothesis
import torch
from hypothesis import strategies as st
from lockstep import run_all, shard_all
from torch import nn
from torch.nn import functional as F

TOLERANCE = 1e-4

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh, "none": lambda x: x}


class Block(nn.Module):
    """One drawn block: norm or none, attention or MLP, gated or not, residual or not."""

    def __init__(self, width, spec):
        super().__init__()
        self.spec, bias = spec, spec["bias"]
        self.norm = nn.LayerNorm(width) if spec["norm"] else nn.Identity()
        if spec["kind"] == "mlp":
            self.up = nn.Linear(width, spec["hidden"], bias)
            self.gate = nn.Linear(width, spec["hidden"], bias) if spec["gated"] else None
            self.down = nn.Linear(spec["hidden"], width, bias)
        else:
            heads, kv_heads, size = spec["heads"], spec["kv_heads"], spec["head_size"]
            self.q = nn.Linear(width, heads * size, bias)
            self.kv = nn.Linear(width, 2 * kv_heads * size, bias)
            self.out = nn.Linear(heads * size, width, bias)

    def forward(self, x):
        y = self.norm(x)
        y = self.mlp(y) if self.spec["kind"] == "mlp" else self.attention(y)
        return x + y if self.spec["residual"] else y

    def mlp(self, x):
        act = ACTIVATIONS[self.spec["act"]]
        y = act(self.up(x))
        return self.down(y if self.gate is None else y * self.gate(x))

    def attention(self, x):
        b, s, _ = x.shape
        heads, kv_heads, size = self.spec["heads"], self.spec["kv_heads"], self.spec["head_size"]
        q = self.q(x).view(b, s, heads, size).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2 * kv_heads, size).transpose(1, 2).chunk(2, dim=1)
        if self.spec["repeat"]:
            k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.spec["repeat"])
        return self.out(y.transpose(1, 2).reshape(b, s, heads * size))


@st.composite
def stacks(draw):
    width = draw(st.sampled_from([8, 24, 30, 64]))
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
        kv_heads = draw(st.integers(1, 4))
        blocks.append(
            {
                "kind": draw(st.sampled_from(["mlp", "attention"])),
                "norm": draw(st.booleans()),
                "residual": draw(st.booleans()),
                "bias": draw(st.booleans()),
                "hidden": draw(st.sampled_from([16, 36, 50, 97, 128])),
                "gated": draw(st.booleans()),
                "act": draw(st.sampled_from(sorted(ACTIVATIONS))),
                "heads": kv_heads * draw(st.integers(1, 4)),
                "kv_heads": kv_heads,
                "head_size": draw(st.sampled_from([4, 6, 16])),
                "repeat": draw(st.booleans()),
            }
        )
    return width, blocks, draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.booleans())


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(stacks())
def test_any_stack_of_blocks_gives_the_unsharded_answer(drawn):
    width, specs, num_ranks, batch, sequence_parallel = drawn
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, spec) for spec in specs)).eval()
    x = torch.randn(batch, 5, width)
    _, graphs, board = shard_all(model, x, num_ranks, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        expected = model(x)
    scale = expected.abs().max().item()
    for out in run_all(graphs, x, board):
        error = (out - expected).abs().max().item()
        assert error <= TOLERANCE * max(scale, 1e-3), f"{num_ranks} ranks: error {error} of {scale}"
