"""Ranks hold the same bytes, whatever the numbers of heads: large models, planned without their weights."""

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
import torch
from zoo import causal

from numadist import models
from numadist.pipeline.explain import param_bytes
from numadist.pipeline.stages import capture
from numadist.sharding.build_schema import build_schema
from numadist.weights.fake import empty_parameters

MAX_SPREAD = 1.02
CONFIGS = {
    "smollm2-135m": transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    **{name: models.config_of(name) for name in ("gpt2", "gemma3-270m", "qwen3-0.6b")},
    "llama3-8b": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}
LARGE = ("llama3-8b", "qwen3-0.6b")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_hold_the_same_bytes(name):
    with empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
    captured = capture(model, causal())
    for num_ranks in (2, 3, 4, 6, 8) if name in LARGE else (2,):
        schema = build_schema(captured, num_ranks)
        held = [param_bytes(captured.gm, schema, rank) for rank in range(num_ranks)]
        assert max(held) <= MAX_SPREAD * min(held), f"{num_ranks} ranks: {held}"
