"""Sequence parallelism: between blocks a rank computes its own tokens, and the answer is the unsharded model's."""

import logging

import pytest
import torch
from lockstep import Board, run_all, shard_all
from torch import nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

pytest.importorskip("transformers", reason="needs the extra `models`")

from zoo import ZOO, causal, main_output, make

from numadist.commands import explain as explain_command
from numadist.errors import ShardError
from numadist.graph.passes import run_passes
from numadist.pipeline import passes
from numadist.pipeline.explain import explain
from numadist.pipeline.plan import plan
from numadist.pipeline.stages import capture
from numadist.sharding.apply import apply
from numadist.sharding.collectives import Emitter
from numadist.sharding.placement import DimShard, Shard
from numadist.sharding.schema import Schema

MAX_ERROR = 1e-5  # of the output's scale, fp32
MAX_BF16_RATIO = 1.5

# Ten tokens a sequence, but 17 patches: one sequence is split by positions, several by sequences.
CASES = [
    ("gpt2", 2, 1),
    ("gpt2", 3, 3),
    ("bert", 2, 3),
    ("bert-mlm", 3, 1),
    ("llama-uneven", 2, 2),
    ("llama-uneven", 3, 1),
    ("gemma3", 2, 1),
    ("t5", 2, 2),
    ("t5", 3, 1),
    ("vit", 2, 1),
    ("mixtral", 2, 2),
    ("whisper", 2, 1),
    ("multihead-attention", 3, 3),
]


def inputs_of(name, batch, dtype=torch.float32):
    """The zoo's inputs, which have two sequences, with one to three."""
    inputs = tree_map_only(torch.Tensor, lambda x: torch.cat([x, x[:1]])[:batch], ZOO[name].inputs())
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def call(model, inputs):
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def check_equal(model, inputs, num_ranks, tolerance=MAX_ERROR, **options):
    schema, graphs, board = shard_all(model, inputs, num_ranks, sequence_parallel=True, **options)
    check_outputs(model, inputs, graphs, board, tolerance)
    return schema, graphs, board


def check_outputs(model, inputs, graphs, board, tolerance=MAX_ERROR):
    expected = main_output(call(model, inputs)).float()
    outputs = [main_output(out).float() for out in run_all(graphs, inputs, board)]
    assert all(torch.equal(out, outputs[0]) for out in outputs), "ranks differ in bits"
    error = ((outputs[0] - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"error {error:.1e} of the output's scale"


@pytest.mark.parametrize(("name", "num_ranks", "batch"), CASES)
def test_fp32_equals_the_unsharded_model(name, num_ranks, batch):
    schema, _, _ = check_equal(make(name), inputs_of(name, batch), num_ranks)
    assert schema.sequence.values
    assert not schema.sequence.all_reduced, schema.sequence.all_reduced


@pytest.mark.parametrize("name", ["bert", "gemma3"])
def test_bf16_is_no_further_from_fp32_than_the_unsharded_model(name):
    model, inputs = make(name).bfloat16(), inputs_of(name, 1, torch.bfloat16)
    truth = main_output(call(make(name).bfloat16().float(), inputs_of(name, 1)))
    unsharded = (main_output(call(model, inputs)).float() - truth).abs().max().item()
    _, graphs, board = shard_all(model, inputs, 2, sequence_parallel=True)
    for out in run_all(graphs, inputs, board):
        ours = (main_output(out).float() - truth).abs().max().item()
        assert ours <= MAX_BF16_RATIO * unsharded, f"bf16 error {ours:.2e}, unsharded {unsharded:.2e}"


class NormRows(TorchDispatchMode):
    """Counts the rows that layer norms compute while it is active, in this thread."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default:
            self.rows += out[0].numel() // out[0].shape[-1]
        return out


def test_every_token_is_normalized_by_one_rank():
    model, inputs = make("bert"), inputs_of("bert", 1)
    with NormRows() as whole:
        call(model, inputs)
    _, graphs, board = shard_all(model, inputs, 3, sequence_parallel=True)
    rows = [0, 0, 0]

    def counting(rank):
        def run(*args, **kwargs):
            with NormRows() as counted:
                out = graphs[rank](*args, **kwargs)
            rows[rank] = counted.rows
            return out

        return run

    run_all([counting(rank) for rank in range(3)], inputs, board)
    assert rows == [20, 20, 10], "five norms of ten tokens: 4 + 4 + 2 tokens each"
    assert sum(rows) == whole.rows


def ops_of(graphs):
    """How often each collective stands in a rank's graph."""
    names = [getattr(n.target, "__name__", "") for n in graphs[0].graph.nodes]
    return {name: names.count(name) for name in ("all_reduce", "reduce_scatter", "all_gather")}


def test_a_token_crosses_twice_a_block_and_no_more():
    _, graphs, _ = check_equal(make("bert"), inputs_of("bert", 1), 2)
    # Five sums: embedding, two attentions, two MLPs. Each is normalized, and the result goes into the next block whole.
    assert ops_of(graphs) == {"all_reduce": 0, "reduce_scatter": 5, "all_gather": 5}


def test_of_several_sequences_only_the_last_positions_are_gathered_for_the_head():
    schema, graphs, _ = check_equal(make("llama"), {**causal(10, 4), "logits_to_keep": 1}, 2)
    gathered = {g.args[0] for g in graphs[0].graph.nodes if getattr(g.target, "__name__", "") == "all_gather"}
    assert any(n.target is torch.ops.aten.slice.Tensor and n.name in schema.sequence.values for n in gathered)


def test_products_of_gathered_values_are_written_for_inductor_as_others_are():
    _, graphs, board = shard_all(make("gpt2"), inputs_of("gpt2", 1), 2, sequence_parallel=True)
    for gm in graphs:
        run_passes(gm, passes.INFERENCE)
        assert torch.ops.aten.addmm.default not in [node.target for node in gm.graph.nodes]
    check_outputs(make("gpt2"), inputs_of("gpt2", 1), graphs, board)


@pytest.mark.parametrize(
    ("dynamic", "splits"), [({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, False), ({1: Dim.DYNAMIC}, True)]
)
def test_dynamic_tokens_are_all_reduced_and_dynamic_lengths_of_a_fixed_batch_are_not(dynamic, splits):
    model = make("gpt2")
    shapes = {"input_ids": dynamic, "use_cache": None}
    schema, graphs, board = check_equal(model, causal(10, 2), 2, dynamic_shapes=shapes)
    check_outputs(model, causal(13, 2), graphs, board)
    reasons = [entry.reason for entry in schema.sequence.all_reduced]
    if splits:
        assert not reasons
    else:
        assert len(reasons) == 5
        assert all("number of tokens is dynamic" in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("length", "num_ranks", "reason"),
    [(1, 2, "it has one token"), (2, 3, "2 tokens (dim 1) cannot be split over 3 ranks")],
)
def test_too_few_tokens_are_all_reduced_with_one_warning(length, num_ranks, reason, caplog):
    model, inputs = make("gpt2"), causal(length, 1)
    schema, graphs, _ = check_equal(model, inputs, num_ranks)
    assert {entry.reason for entry in schema.sequence.all_reduced} == {reason}
    assert ops_of(graphs)["reduce_scatter"] == 0
    with caplog.at_level(logging.WARNING, logger="numadist"):
        plan(model, inputs, num_ranks, sequence_parallel=True)
    (text,) = [r.getMessage() for r in caplog.records if r.name.startswith("numadist")]
    assert text.endswith(f"transformer.h.0.mlp.dropout and 2 more: {reason}")


class Bare(nn.Module):
    """Two MLPs; what is between them is read whole by a layer, or by a sum over all tokens."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes
        self.layers = nn.Sequential(*(nn.Linear(*s) for s in ((16, 32), (32, 16), (16, 32), (32, 16))))

    def forward(self, x):
        up, down, up2, down2 = self.layers
        y = down(torch.relu(up(x)))
        y = x + y.mean(dim=1, keepdim=True) if self.mixes else y
        return x + down2(torch.relu(up2(y)))


@pytest.mark.parametrize(("mixes", "reader"), [(False, "aten.linear.default"), (True, "aten.mean.dim")])
def test_a_sum_that_is_needed_whole_at_once_is_all_reduced(mixes, reader):
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    schema, graphs, _ = check_equal(Bare(mixes), (x,), 2)
    (entry,) = schema.sequence.all_reduced
    assert entry.reason == f"{reader} needs all its tokens"
    assert ops_of(graphs) == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}


class Spread(nn.Module):
    """One sequence's block is added to several sequences: their tokens are no longer one piece of memory."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, one, many):
        return many + self.norm(self.down(torch.relu(self.up(one))))


def test_tokens_that_are_spread_over_several_sequences_are_gathered_first():
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn(1, 6, 16, generator=generator), torch.randn(3, 6, 16, generator=generator))
    schema, _, _ = check_equal(Spread(), inputs, 2)
    assert "layer_norm" in schema.sequence.values
    assert "add" not in schema.sequence.values


class Two(nn.Module):
    """The residual leaves the model too."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x):
        y = x + self.down(torch.relu(self.up(x)))
        return self.norm(y), y


def test_every_output_is_whole():
    model, x = Two(), torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    _, graphs, board = check_equal(model, (x,), 2)
    for out in run_all(graphs, (x,), board):
        torch.testing.assert_close(out, call(model, (x,)), atol=1e-6, rtol=1e-5)


def test_the_schema_round_trips_and_values_removed_from_it_are_computed_whole():
    model, inputs = make("bert"), inputs_of("bert", 1)
    schema, _, _ = check_equal(model, inputs, 2)
    again = Schema.from_json(schema.to_json())
    assert again == schema
    for name in ("dropout_2", "layer_norm_3"):  # the sum of the first MLP, and a norm after another sum
        del again.sequence.values[name]
    _, graphs, board = shard_all(model, inputs, 2, schema=again)
    check_outputs(model, inputs, graphs, board)
    assert ops_of(graphs) == {"all_reduce": 1, "reduce_scatter": 4, "all_gather": 5}


def test_a_block_removed_from_the_schema_takes_its_sum_along():
    model, inputs = make("bert"), inputs_of("bert", 1)
    schema, _, _ = check_equal(model, inputs, 2)
    schema.blocks = [b for b in schema.blocks if b.module != "encoder.layer.0.attention"]
    _, graphs, board = shard_all(model, inputs, 2, schema=schema)
    check_outputs(model, inputs, graphs, board)
    assert ops_of(graphs)["reduce_scatter"] == 4


def test_other_placements_than_the_graph_allows_are_refused():
    model, inputs = make("bert"), inputs_of("bert", 1)
    schema, _, _ = shard_all(model, inputs, 2, sequence_parallel=True)
    name = next(iter(schema.sequence.values))
    schema.sequence.values[name] = Shard({1: DimShard((((0, 2),), ((2, 10),)))})
    with pytest.raises(ShardError, match=f"of {name}; only .* is possible"):
        shard_all(model, inputs, 2, schema=schema)


def test_a_schema_of_version_2_still_loads():
    schema, _, _ = shard_all(Bare(False), (torch.randn(1, 6, 16),), 2)
    text = (
        schema.to_json()
        .replace('"numadist_schema": 3', '"numadist_schema": 2')
        .replace(',\n "sequence": null', "")
    )
    assert "sequence" not in text
    assert Schema.from_json(text) == schema


def test_collectives_that_cannot_scatter_are_told_before_weights_are_loaded():
    x = torch.randn(1, 6, 16)
    schema, _, _ = shard_all(Two(), (x,), 2, sequence_parallel=True)
    emit = Board(2).emitter(0)
    with pytest.raises(ShardError, match=r"sequence parallelism, .* for inference only"):
        apply(capture(Two(), (x,)).gm, schema, 0, Emitter(emit.all_reduce, emit.all_gather))


def test_explain_shows_collectives_and_bytes_and_what_a_rank_computes_for_its_tokens():
    text = explain(make("bert"), inputs_of("bert", 1), 2, sequence_parallel=True)
    for expected in (
        "all-reduces per forward: 0",
        "reduce-scatters per forward: 5 of (1, 10, 64) float32, 0.01 MB in all",
        "all-gathers per forward: 5 of (1, 10, 64) float32, 0.01 MB in all",
        "    reduce_scatter(dropout_1)  # (1, 10, 64) float32",
        "own tokens after dropout_1: dim 1 [0:5 | 5:10] (5+5)",
        "# dim 1 [0:5 | 5:10] (5+5) -> gathered",
        "own tokens after dropout_3: as after dropout_1",
    ):
        assert expected in text, f"missing {expected!r} in:\n{text}"


def test_the_shell_shows_it_too(capsys):
    assert explain_command.main(["gpt2-tiny", "--seq", "8", "--sequence-parallel"]) == 0
    assert "reduce-scatters per forward: 5 of (1, 8, 96) float32" in capsys.readouterr().out
