"""GGUF files of the models decode.py runs, for llama.cpp, with the weights the other rows use."""

import subprocess
from pathlib import Path

import gguf
import torch

from numadist import models

# llama.cpp's name: (Hugging Face's, whether it is a Conv1D weight, stored [in, out])
_LAYER = {
    "attn_norm.weight": ("ln_1.weight", False),
    "attn_norm.bias": ("ln_1.bias", False),
    "attn_qkv.weight": ("attn.c_attn.weight", True),
    "attn_qkv.bias": ("attn.c_attn.bias", False),
    "attn_output.weight": ("attn.c_proj.weight", True),
    "attn_output.bias": ("attn.c_proj.bias", False),
    "ffn_norm.weight": ("ln_2.weight", False),
    "ffn_norm.bias": ("ln_2.bias", False),
    "ffn_up.weight": ("mlp.c_fc.weight", True),
    "ffn_up.bias": ("mlp.c_fc.bias", False),
    "ffn_down.weight": ("mlp.c_proj.weight", True),
    "ffn_down.bias": ("mlp.c_proj.bias", False),
}


def write(name: str, dtype: str, folder: Path, python: str, converter: Path) -> Path | None:
    """The model's file in `dtype`; None for a model we write no file of."""
    path = folder / f"{name}.gguf"
    if name == "smollm2" and dtype == "bfloat16":
        command = [python, str(converter), "convert", str(models.smollm2_path()), str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    elif name.startswith("gpt2"):
        _write_gpt2(models.build(name, getattr(torch, dtype)), path)
    else:
        return None
    return path


def _write_gpt2(model: torch.nn.Module, path: Path) -> None:
    config, weights = model.config, model.transformer.state_dict()
    out = gguf.GGUFWriter(str(path), "gpt2")
    out.add_context_length(config.n_positions)
    out.add_embedding_length(config.n_embd)
    out.add_feed_forward_length(4 * config.n_embd)
    out.add_block_count(config.n_layer)
    out.add_head_count(config.n_head)
    out.add_layer_norm_eps(config.layer_norm_epsilon)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("no_vocab")
    _add(out, "token_embd.weight", weights["wte.weight"])
    _add(out, "position_embd.weight", weights["wpe.weight"].float())
    _add(out, "output_norm.weight", weights["ln_f.weight"])
    _add(out, "output_norm.bias", weights["ln_f.bias"])
    for i in range(config.n_layer):
        for theirs, (ours, is_conv) in _LAYER.items():
            weight = weights[f"h.{i}.{ours}"]
            _add(out, f"blk.{i}.{theirs}", weight.T if is_conv else weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _add(out: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    """Vectors as float32, which llama.cpp adds and scales in."""
    if weight.dim() == 1 or weight.dtype == torch.float32:
        out.add_tensor(name, weight.float().contiguous().numpy())
        return
    bits = weight.contiguous().view(torch.uint8).numpy()  # NumPy has no bfloat16
    out.add_tensor(name, bits, raw_shape=bits.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)
