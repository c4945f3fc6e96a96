"""Language models from configs: sharded over any rank count they equal the unsharded model."""

import pytest
import torch
from lockstep import local_fraction, run_all, shard_all

pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist import models
from numadist.pipeline.explain import explain

FIXED = {"use_cache": False, "logits_to_keep": 1}
ANY_LENGTH = {"input_ids": {1: torch.export.Dim.DYNAMIC}, "use_cache": None, "logits_to_keep": None}
MAX_ERROR = 1e-5


def tokens(length):
    return torch.randint(512, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_logits_equal_the_unsharded_model(name, num_ranks, dynamic):
    model = models.build(name)
    example = {"input_ids": tokens(10), **FIXED}
    schema, graphs, board = shard_all(model, example, num_ranks, ANY_LENGTH if dynamic else None)
    for length in (10, 23) if dynamic else (10,):
        inputs = {"input_ids": tokens(length), **FIXED}
        with torch.no_grad():
            expected = model(**inputs).logits
        for rank, out in enumerate(run_all(graphs, inputs, board)):
            error = (out.logits - expected).abs().max().item()
            assert error < MAX_ERROR, f"{name}, rank {rank} of {num_ranks}, length {length}: {error}"
    assert not schema.left_alone, schema.left_alone
    assert local_fraction(graphs, model) < 1 / num_ranks + 0.1


def test_uneven_heads_are_split_on_whole_kv_groups():
    schema, _, _ = shard_all(models.build("llama-tiny"), {"input_ids": tokens(6), **FIXED}, 2)
    (attention,) = [b for b in schema.blocks if b.module == "model.layers.0.self_attn"]
    q = attention.params["model.layers.0.self_attn.q_proj.weight"]
    k = attention.params["model.layers.0.self_attn.k_proj.weight"]
    assert q.dims[0].cuts == (((0, 48),), ((48, 72),)), "9 heads of 8 in 3 groups: 6 + 3 heads"
    assert k.dims[0].cuts == (((0, 16),), ((16, 24),)), "3 KV heads of 8: 2 + 1"


def test_fused_qkv_is_cut_into_three_intervals_per_rank():
    schema, _, _ = shard_all(models.build("gpt2-tiny"), {"input_ids": tokens(6), **FIXED}, 2)
    (attention,) = [b for b in schema.blocks if b.module == "transformer.h.0.attn"]
    cuts = attention.params["transformer.h.0.attn.c_attn.weight"].dims[1].cuts
    assert cuts[0] == ((0, 48), (96, 144), (192, 240))
    assert cuts[1] == ((48, 96), (144, 192), (240, 288))


def test_tied_embedding_and_head_share_one_cut_table():
    model = models.build("gpt2-tiny", vocab_size=509)  # odd: the last rank's chunk is shorter
    example = {"input_ids": tokens(6) % 509, **FIXED}
    schema, graphs, board = shard_all(model, example, 2)
    (table,) = [b for b in schema.blocks if b.heads]
    assert table.lookups
    assert list(table.params) == ["lm_head.weight"]
    with torch.no_grad():
        expected = model(**example).logits
    for out in run_all(graphs, example, board):
        assert out.logits.shape == expected.shape
        assert (out.logits - expected).abs().max().item() < MAX_ERROR


def test_explain_shows_every_decision_on_the_graphs_lines():
    text = explain(models.build("gpt2-tiny"), {"input_ids": tokens(6), **FIXED}, 2)
    for expected in (
        "2 ranks; sharded blocks: 2 x attention, 2 x mlp",
        "all-reduces per forward: 5 of (1, 6, 96) float32",
        "transformer.h.0.attn.c_attn.weight: dim 1 [0:48,96:144,192:240 | 48:96,144:192,240:288]",
        "# column-parallel -> dim 1 [0:192 | 192:384] (192+192)",
        "# row-parallel -> partial",
        "transformer.h.1.mlp: mlp, as transformer.h.0.mlp",
        "# logits of this rank's rows -> gathered over the last dim",
    ):
        assert expected in text, f"missing {expected!r} in:\n{text}"
