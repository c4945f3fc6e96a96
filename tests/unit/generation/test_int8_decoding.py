"""Decoding on int8 weights: every linear layer of the decode graph, as near as quantized weights can be."""

import copy
import logging

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import captured, generators, prompts, tiny

from numadist.errors import GenerateError
from numadist.generation.step import capture_step
from numadist.graph.passes import run_passes
from numadist.kernels import int8
from numadist.lowering.packing import can_pack
from numadist.pipeline import passes


def logits(gm, kv_dtype, layers):
    """Of one token each in two rows, after 8 random keys and values."""
    draw = torch.Generator().manual_seed(3)
    tokens, positions = torch.tensor([[5], [77]]), torch.full((2, 1), 8)

    def kv(size):
        return [
            torch.randn(2, k.num_heads, 16, getattr(k, size), generator=draw).to(kv_dtype) for k in layers
        ]

    with torch.no_grad():
        return gm(tokens, positions, positions.clone(), kv("key_size"), kv("value_size")).float()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_are_those_of_the_model_with_quantized_weights(name):
    if not (int8.takes(2, torch.bfloat16) and can_pack(torch.bfloat16)):
        pytest.skip(
            "needs a CPU with AVX512-BF16 and VBMI that NUMADIST_MAX_ISA allows"
        )  # else see the test below
    step = capture_step(copy.deepcopy(tiny(name)).bfloat16())
    exact = copy.deepcopy(captured(name))
    with torch.no_grad():
        for key, weight in exact.gm.named_parameters():
            weight.copy_(dict(step.gm.named_parameters())[key])
    unquantized = logits(exact.gm, torch.float32, step.layers)
    embedded = {"wte", "wpe", "embed_tokens"}
    with torch.no_grad():
        for key, weight in exact.gm.named_parameters():
            if weight.dim() == 2 and not embedded & set(key.split(".")):
                across = weight.t() if name == "gpt2" and "lm_head" not in key else weight
                q_NK, scale_N = int8.quantize(across)
                across.copy_(q_NK * scale_N[:, None])
    run_passes(step.gm, [*passes.PACKED, *passes.DECODE_INT8])
    assert [n for n in step.gm.graph.nodes if n.target is torch.ops.numadist.int8_linear.default]
    assert not [n for n in step.gm.graph.nodes if n.target is torch.ops.mkldnn._linear_pointwise.default]
    seen = logits(step.gm, torch.bfloat16, step.layers)
    scale = unquantized.abs().max()
    assert (seen - unquantized).abs().max() < 0.1 * scale
    # A tied head is quantized in the graph alone, not in the embedding that the exact model shares with it.
    if not tiny(name).config.tie_word_embeddings:
        wanted = logits(exact.gm, torch.float32, step.layers)
        assert (seen - wanted).abs().max() < 0.03 * scale


def test_a_model_or_machine_without_it_decodes_on_its_own_weights(caplog):
    with caplog.at_level(logging.WARNING, "numadist"):
        (generator,) = generators("llama", 1, compile=True, quantization="int8")
    assert "quantization='int8' is left out: it needs a bfloat16 model" in caplog.text
    (plain,) = generators("llama", 1)
    new = [g.generate(prompts(5), max_new_tokens=8, eos_token_id=()) for g in (generator, plain)]
    assert new[0] == new[1]
    assert generator.local_bytes == plain.local_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int4", "compile": True}, "must be 'int8' or None, got 'int4'"),
        ({"quantization": "int8"}, "needs compile=True"),
    ],
)
def test_what_is_not_offered_is_an_error(options, message):
    with pytest.raises(GenerateError, match=message):
        generators("llama", 1, **options)
