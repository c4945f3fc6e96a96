"""A small Llama as a GGUF file whose tensors have formats of our choice, with random codes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from numadist import models
from numadist.weights.fake import empty_parameters

# Bytes of a block that are scales in f16: an own one, and the minimum.
_SCALES = {"Q6_K": (208,), "Q2_K": (80, 82), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
_HALF_OF_CODES = {"Q4_1": 8, "Q5_1": 16, "Q4_K": 300, "Q5_K": 700, "Q2_K": 10}
# Numbers of random codes have about this size times their scale.
_SPREAD = {
    **{"Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9, "Q5_1": 9, "Q8_0": 74},
    **{"Q2_K": 13, "Q4_K": 170, "Q5_K": 330, "Q6_K": 1400, "IQ4_NL": 70},
}
# Layers alternate between these.
MIXED = (
    {
        "attn_q": "Q4_0",
        "attn_k": "Q4_1",
        "attn_v": "Q6_K",
        "attn_output": "Q5_0",
        "ffn_gate": "Q5_1",
        "ffn_up": "Q4_K",
    },
    {
        "attn_q": "Q4_K",
        "attn_k": "Q5_K",
        "attn_v": "Q8_0",
        "attn_output": "Q5_K",
        "ffn_gate": "F16",
        "ffn_up": "Q8_0",
    },
)
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def config(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**CONFIG, **changes})


def without_memory(dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    with empty_parameters():
        return transformers.AutoModelForCausalLM.from_config(config(**changes), dtype=dtype).eval()


def write(
    path: Path, layers: tuple[Mapping[str, str], ...] = MIXED, table: str = "Q8_0", **changes: Any
) -> None:
    """Of the config with these changes; ffn_down is as ffn_up is unless a layer says so."""
    c = config(**changes)
    torch.manual_seed(models.SEED)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    kv = c.num_key_value_heads * c.head_dim
    shapes = {
        "attn_q": (c.hidden_size, c.hidden_size),
        "attn_k": (kv, c.hidden_size),
        "attn_v": (kv, c.hidden_size),
        "attn_output": (c.hidden_size, c.hidden_size),
        "ffn_gate": (c.intermediate_size, c.hidden_size),
        "ffn_up": (c.intermediate_size, c.hidden_size),
        "ffn_down": (c.hidden_size, c.intermediate_size),
    }
    for name in ("token_embd", "output"):
        add(writer, f"{name}.weight", table, (c.vocab_size, c.hidden_size), 0.4)
    add(writer, "output_norm.weight", "F32", (c.hidden_size,))
    for i in range(c.num_hidden_layers):
        for name in ("attn_norm", "ffn_norm"):
            add(writer, f"blk.{i}.{name}.weight", "F32", (c.hidden_size,))
        kinds = layers[i % len(layers)]
        for name, shape in shapes.items():
            kind = kinds[name] if name in kinds else kinds["ffn_up"]
            add(writer, f"blk.{i}.{name}.weight", kind, shape, 2.0 / shape[1] ** 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: Any, name: str, kind: str, shape: tuple[int, ...], size: float = 0.0) -> None:
    """A tensor whose numbers have about this size; of F32 they are near 1."""
    if kind == "F32":
        writer.add_tensor(name, (1 + 0.1 * torch.randn(shape)).numpy())
        return
    if kind == "F16":
        writer.add_tensor(name, (size * torch.randn(shape)).half().numpy())
        return
    of = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[of]
    raw = torch.randint(256, (*shape[:-1], shape[-1] // block, block_bytes), dtype=torch.uint8)
    scale = size / _SPREAD[kind] * torch.empty(*raw.shape[:-1], 1).uniform_(0.5, 1.5)
    places = _SCALES.get(kind, (0,))
    raw[..., places[0] : places[0] + 2] = scale.half().view(torch.uint8)
    if len(places) > 1:  # the numbers of a group lie around zero
        factor = -_HALF_OF_CODES[kind] if kind in ("Q4_1", "Q5_1") else _HALF_OF_CODES[kind] / 30
        raw[..., places[1] : places[1] + 2] = (factor * scale).half().view(torch.uint8)
    writer.add_tensor(name, raw.flatten(-2).numpy(), raw_dtype=of)
