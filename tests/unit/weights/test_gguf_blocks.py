"""Blocks of GGUF files taken apart are, bit for bit, what the package gguf makes of them."""

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs the extra `models`")

from numadist.weights.gguf_blocks import KINDS, unpack

# Bytes of a block that are scales in f16.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_block_counts_as_in_gguf(kind):
    torch.manual_seed(len(kind))
    of = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[of]
    raw = torch.randint(256, (40, 3, block_bytes), dtype=torch.uint8)
    for place in SCALES[kind]:
        raw[..., place : place + 2] = torch.randn(40, 3, 1).half().view(torch.uint8)
    wanted = torch.from_numpy(gguf.dequantize(raw.flatten(1).numpy(), of))
    assert torch.equal(unpack(kind, raw, 3 * block).widened(), wanted)
