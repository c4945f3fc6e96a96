"""GGUF files for llama.cpp with the weights of a transformers model, in its dtype."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from numadist.compare.variants import CannotRun

# llama.cpp's name of a tensor of layer i, after `blk.i.`: transformers' name.
_GPT2_LAYER = {
    "attn_norm.weight": "ln_1.weight",
    "attn_norm.bias": "ln_1.bias",
    "attn_qkv.weight": "attn.c_attn.weight",
    "attn_qkv.bias": "attn.c_attn.bias",
    "attn_output.weight": "attn.c_proj.weight",
    "attn_output.bias": "attn.c_proj.bias",
    "ffn_norm.weight": "ln_2.weight",
    "ffn_norm.bias": "ln_2.bias",
    "ffn_up.weight": "mlp.c_fc.weight",
    "ffn_up.bias": "mlp.c_fc.bias",
    "ffn_down.weight": "mlp.c_proj.weight",
    "ffn_down.bias": "mlp.c_proj.bias",
}
_LLAMA_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def write_gguf(model: torch.nn.Module, path: Path) -> None:
    """Raises: CannotRun for an architecture other than GPT-2 and Llama, or one with scaled rotary embeddings."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in ("gpt2", "llama"):
        raise CannotRun(f"we write GGUF files of GPT-2 and Llama for llama.cpp, not of {kind}")
    if kind == "llama" and config.rope_parameters["rope_type"] != "default":
        raise CannotRun(
            f"we write no GGUF files with rotary embeddings {config.rope_parameters['rope_type']}"
        )
    out = gguf.GGUFWriter(str(path), kind)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_head_count(config.num_attention_heads)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("no_vocab")
    if kind == "gpt2":
        out.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        out.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        out.add_feed_forward_length(config.intermediate_size)
        out.add_layer_norm_rms_eps(config.rms_norm_eps)
        out.add_head_count_kv(config.num_key_value_heads)
        out.add_rope_dimension_count(config.head_dim)
        out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, weight in _gpt2_tensors(model) if kind == "gpt2" else _llama_tensors(model):
        _add(out, name, weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _gpt2_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    config: Any = model.config
    weights = model.state_dict()
    yield "token_embd.weight", weights["transformer.wte.weight"]
    yield "position_embd.weight", weights["transformer.wpe.weight"].float()
    yield "output_norm.weight", weights["transformer.ln_f.weight"]
    yield "output_norm.bias", weights["transformer.ln_f.bias"]
    for i in range(config.num_hidden_layers):
        for theirs, ours in _GPT2_LAYER.items():
            weight = weights[f"transformer.h.{i}.{ours}"]
            # Conv1D keeps its weights as [in, out].
            yield f"blk.{i}.{theirs}", weight.T if weight.dim() == 2 else weight


def _llama_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    config: Any = model.config
    weights = model.state_dict()
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    if not config.tie_word_embeddings:
        yield "output.weight", weights["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        for theirs, ours in _LLAMA_LAYER.items():
            weight = weights[f"model.layers.{i}.{ours}"]
            if theirs in heads:
                # Rotary embedding turns pairs that are half a head apart here, and neighbours in llama.cpp.
                weight = weight.unflatten(0, (heads[theirs], 2, -1)).transpose(1, 2).flatten(0, 2)
            yield f"blk.{i}.{theirs}", weight


def _add(out: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    """Vectors as float32, which llama.cpp adds and scales in."""
    if weight.dim() == 1 or weight.dtype == torch.float32:
        out.add_tensor(name, weight.float().contiguous().numpy())
        return
    bits = weight.contiguous().view(torch.uint8).numpy()  # NumPy has no bfloat16
    out.add_tensor(name, bits, raw_shape=bits.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)
