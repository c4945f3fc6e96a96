"""transformers' from_pretrained(tp_plan="auto"): NAME FOLDER; the logits, and the next tokens of generate."""

import os
import sys

import torch
import torch.distributed as dist
import transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=16),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def main() -> dict[str, list]:
    name, folder = sys.argv[1:]
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(folder)
    dist.barrier()
    # torchrun's variable is what transformers takes for being distributed.
    plan = {"tp_plan": "auto"} if int(os.environ["WORLD_SIZE"]) > 1 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan).eval()
    ids = torch.arange(2, 14).reshape(2, 6)
    with torch.no_grad():
        logits = model(ids).logits
        if hasattr(logits, "full_tensor"):
            logits = logits.full_tensor()
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    num_held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    return {"logits": logits.flatten().tolist(), "tokens": tokens.tolist(), "held": num_held}
