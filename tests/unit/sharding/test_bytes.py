"""Weights per rank of full-size models, planned without memory for a single weight."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist.pipeline.explain import param_bytes
from numadist.pipeline.stages import capture
from numadist.sharding.build_schema import build_schema
from numadist.sharding.schema import Schema
from numadist.weights.fake import empty_parameters

MAX_SHARE = 0.56
CAUSAL = {"use_cache": False, "logits_to_keep": 1}
MODELS = {
    "gpt2-345m": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 24, "n_embd": 1024, "n_head": 16}, CAUSAL),
    "bert-large": (
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        {},
    ),
    "llama-1b": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 128_256,
            "tie_word_embeddings": True,
        },
        CAUSAL,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_hold_little_more_than_half_each(name):
    model_class, config_class, options, extra = MODELS[name]
    with empty_parameters():
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options)).eval()
    captured = capture(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long), **extra})
    schema = build_schema(captured, 2)
    whole = param_bytes(captured.gm, Schema(1, ""), 0)
    shares = [param_bytes(captured.gm, schema, rank) / whole for rank in range(2)]
    assert max(shares) <= MAX_SHARE, f"{name}: {shares}"
