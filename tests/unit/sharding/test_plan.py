"""What the planner decides on small hand-made models, and what the result computes."""

import logging

import pytest
import torch
from lockstep import local_fraction, run_all, shard_all
from torch import nn

from numadist.errors import ShardError
from numadist.pipeline.shard import check_group, warn_left_alone
from numadist.pipeline.stages import capture
from numadist.sharding.apply import check_fits
from numadist.sharding.reductions import reduce_points
from numadist.sharding.schema import Schema

TOLERANCE = 2e-5


class MLP(nn.Module):
    def __init__(self, width=48, hidden=96, bias=True, act=nn.GELU):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, hidden, bias), act(), nn.Linear(hidden, width, bias)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class GatedMLP(nn.Module):
    def __init__(self, width=48, hidden=96):
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Attention(nn.Module):
    """Multi-head attention with fused, interleaved or separate QKV, spelled in torch ops."""

    def __init__(self, width=48, heads=6, layout="fused", spelled_out=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.layout, self.spelled_out = heads, layout, spelled_out

    def forward(self, x):
        b, s, c = x.shape
        if self.layout == "fused":
            q, k, v = (
                t.view(b, s, self.heads, c // self.heads).transpose(1, 2) for t in self.qkv(x).split(c, dim=2)
            )
        elif self.layout == "interleaved":  # GPT-NeoX: head, then q, k, v
            y = self.qkv(x).view(b, s, self.heads, 3 * c // self.heads).transpose(1, 2)
            q, k, v = y.chunk(3, dim=-1)
        else:  # timm: q/k/v, then head
            q, k, v = (
                self.qkv(x).reshape(b, s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            )
        if self.spelled_out:
            weights = (q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5).softmax(-1)
            y = weights @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, c))


class RepeatedKV(Attention):
    """Grouped KV heads spelled with repeat_interleave."""

    def __init__(self, width=48, heads=6, kv_heads=3):
        super().__init__(width, heads)
        self.kv_heads = kv_heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * width // heads)

    def forward(self, x):
        b, s, c = x.shape
        size, kv = c // self.heads, self.kv_heads * c // self.heads
        q, k, v = self.qkv(x).split([c, kv, kv], dim=-1)
        q = q.view(b, s, self.heads, size).transpose(1, 2)
        repeats = self.heads // self.kv_heads
        k, v = (
            t.view(b, s, self.kv_heads, size).transpose(1, 2).repeat_interleave(repeats, dim=1)
            for t in (k, v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, c))


class Residual(nn.Module):
    def __init__(self, inner, width=48):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), as in GPT-J and Phi: two partial sums meet in an add."""

    def __init__(self, width=48):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), Attention(width), MLP(width)

    def forward(self, x):
        y = self.norm(x)
        return x + (self.attn(y) + self.mlp(y))


def check_equal(model, x, num_ranks, schema=None):
    """Shard, run all ranks, compare with the unsharded model; returns the schema and the ranks' graphs."""
    model.eval()
    schema, graphs, board = shard_all(model, x, num_ranks, schema=schema)
    with torch.no_grad():
        expected = model(x)
    for rank, out in enumerate(run_all(graphs, x, board)):
        error = (out - expected).abs().max().item()
        assert error < TOLERANCE, f"rank {rank} of {num_ranks}: max error {error}"
    return schema, graphs


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (MLP, "mlp"),
        (lambda: MLP(bias=False, act=nn.ReLU), "mlp"),
        (GatedMLP, "gated mlp"),
        (Attention, "attention"),
        (lambda: Attention(layout="interleaved"), "attention"),
        (lambda: Attention(layout="stacked"), "attention"),
        (lambda: Attention(spelled_out=True), "attention"),
        (lambda: RepeatedKV(kv_heads=6), "attention"),
    ],
    ids=[
        "mlp",
        "no-bias",
        "gated",
        "fused-qkv",
        "interleaved-qkv",
        "stacked-qkv",
        "spelled-out",
        "repeated-kv",
    ],
)
def test_block_is_sharded_and_right(make, kind, num_ranks):
    model = Residual(make())
    schema, graphs = check_equal(model, torch.randn(2, 5, 48), num_ranks)
    if num_ranks == 1:
        assert not schema.blocks
        return
    assert [b.kind for b in schema.blocks] == [kind]
    assert not schema.left_alone
    assert local_fraction(graphs, model) < 1 / num_ranks + 0.15


def test_kv_heads_spelled_with_repeat_interleave_are_cut_on_whole_groups():
    schema, _ = check_equal(Residual(RepeatedKV(heads=6, kv_heads=3)), torch.randn(2, 5, 48), 2)
    (block,) = schema.blocks
    assert block.units[-1] == 16, "two query heads of 8 a group"


def test_a_block_needs_one_all_reduce_and_two_partial_sums_share_one():
    x = torch.randn(2, 5, 48)
    sequential = nn.Sequential(Residual(Attention()), Residual(MLP())).eval()
    schema, _ = check_equal(sequential, x, 2)
    gm = capture(sequential, (x,)).gm
    assert len(reduce_points(gm, schema)) == 2

    parallel = ParallelBlock().eval()
    schema, _ = check_equal(parallel, x, 2)
    gm = capture(parallel, (x,)).gm
    assert len(schema.blocks) == 2
    assert len(reduce_points(gm, schema)) == 1


class GatedByABlock(nn.Module):
    """The output of one block is a factor inside the next one, with no layer between."""

    def __init__(self, viewed):
        super().__init__()
        self.viewed = viewed
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 128, bias=False)
        self.gate, self.out = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        y = self.down(nn.functional.gelu(self.up(x)))
        return self.out((y.unsqueeze(0).squeeze(0) if self.viewed else y) * self.gate(x))


@pytest.mark.parametrize("viewed", [False, True])
def test_a_block_takes_its_part_of_a_sum_and_not_of_a_summand(viewed):
    schema, _ = check_equal(GatedByABlock(viewed), torch.randn(3, 64), 2)
    assert len(schema.blocks) == 2


def test_bias_of_the_row_parallel_layer_is_added_once():
    model = MLP()
    with torch.no_grad():
        model.down.bias.fill_(7.0)
    _, graphs = check_equal(model, torch.randn(3, 48), 3)
    held = [dict(gm.named_parameters())["down.bias"].sum().item() for gm in graphs]
    assert held == [7.0 * 48, 0.0, 0.0]


def test_a_stack_of_linear_layers_is_sharded_in_pairs():
    layers = [m for i in range(5) for m in (nn.Linear(48, 48), nn.ReLU())]
    schema, _ = check_equal(nn.Sequential(*layers), torch.randn(4, 48), 2)
    assert [(b.columns, b.sink) for b in schema.blocks] == [
        (["linear"], "linear_1"),
        (["linear_2"], "linear_3"),
    ]
    assert [e.node for e in schema.left_alone] == ["linear_4"]


class Unknown(nn.Module):
    """An op without a rule between the two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x):
        return self.down(torch.fft.fft(self.up(x)).real)


def test_an_op_without_a_rule_leaves_its_block_replicated_with_one_warning(caplog):
    model = nn.Sequential(Residual(Unknown()), Residual(MLP()))
    schema, _ = check_equal(model, torch.randn(2, 5, 48), 2)
    assert [b.module for b in schema.blocks] == ["1.inner"]
    with caplog.at_level(logging.WARNING, logger="numadist"):
        warn_left_alone(schema)
    (text,) = [r.getMessage() for r in caplog.records if r.name.startswith("numadist")]
    for expected in ("0.inner.down", "0.inner.up", "no sharding rule for aten.real"):
        assert expected in text, text


class LeakyMLP(MLP):
    """The hidden value is used outside the block too."""

    def forward(self, x):
        h = self.act(self.up(x))
        return self.down(h) + h.mean()


def test_a_value_used_outside_its_block_keeps_the_layer_before_it_whole():
    schema, _ = check_equal(LeakyMLP(), torch.randn(4, 48), 2)
    assert not schema.blocks


def test_dropout_in_training_mode_is_not_sharded():
    model = nn.Sequential(nn.Linear(48, 96), nn.Dropout(0.5), nn.Linear(96, 48)).train()
    schema, _, _ = shard_all(model, torch.randn(4, 48), 2)
    assert not schema.blocks
    assert "dropout" in schema.left_alone[-1].reason


class DroppingAttention(Attention):
    def forward(self, x):
        b, s, c = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(c, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.out(y.transpose(1, 2).reshape(b, s, c))


def test_dropout_inside_attention_is_not_sharded():
    schema, _, _ = shard_all(Residual(DroppingAttention()), torch.randn(2, 5, 48), 2)
    assert not schema.blocks
    assert "dropout inside attention" in schema.left_alone[-1].reason


def test_more_ranks_than_heads_says_which_counts_work():
    model = Residual(Attention(heads=3))
    schema, _ = check_equal(model, torch.randn(2, 5, 48), 4)
    reasons = {e.reason for e in schema.left_alone}
    assert any("possible rank counts" in r or "inside" in r for r in reasons), reasons


def test_a_tied_weight_used_elsewhere_is_not_cut():
    model = MLP(width=48, hidden=48)
    model.down.weight = model.up.weight
    schema, _ = check_equal(model, torch.randn(4, 48), 2)
    assert not schema.blocks
    assert "different parts of parameter down.weight" in schema.left_alone[-1].reason


def test_schema_round_trips_and_a_removed_block_runs_replicated():
    model = nn.Sequential(Residual(Attention()), Residual(MLP()))
    x = torch.randn(2, 5, 48)
    schema, _ = check_equal(model, x, 2)
    again = Schema.from_json(schema.to_json())
    assert again.to_json() == schema.to_json()
    again.blocks = [b for b in again.blocks if b.kind == "mlp"]
    _, graphs = check_equal(model, x, 2, schema=again)
    assert dict(graphs[0].named_parameters())["0.inner.qkv.weight"].shape == (144, 48)
    assert dict(graphs[0].named_parameters())["1.inner.up.weight"].shape == (48, 48)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "not a numadist schema"),
        ('{"numadist_schema": 99}', "schema version 99"),
        ('{"numadist_schema": 2, "blocks": []}', "damaged"),
    ],
)
def test_a_bad_schema_is_a_clear_error(text, message):
    with pytest.raises(ShardError, match=message):
        Schema.from_json(text)


def test_a_schema_for_another_model_or_rank_count_is_refused():
    x = torch.randn(4, 48)
    schema, _, _ = shard_all(MLP(), x, 2)
    with pytest.raises(ShardError, match="for 2 ranks, this group has 3"):
        check_group(schema, 3)
    with pytest.raises(ShardError, match="another model"):
        check_fits(capture(MLP(hidden=64), (x,)).gm, schema)


class DataDependent(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_control_flow_on_data_is_a_clear_error():
    with pytest.raises(ShardError, match="DataDependent cannot be captured"):
        capture(DataDependent(), (torch.randn(3),))
