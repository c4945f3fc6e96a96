"""Causal language models of transformers, tiny, by the prefix of their classes, with what generation makes of them."""

from typing import Any

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # smaller ones make models that repeat a word
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS_OF_16 = {**GROUPED, "head_dim": 16}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GPT2_LIKE = {
    "vocab_size": 256,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "initializer_range": 0.4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

MODELS: dict[str, dict[str, Any]] = {
    "Apertus": GROUPED,
    "Arcee": HEADS_OF_16,
    "BioGpt": SIZES,
    "CodeGen": {**GPT2_LIKE, "rotary_dim": 8, "n_ctx": 128},
    "Cohere": GROUPED,
    "Cohere2": {**HEADS_OF_16, "sliding_window": 6},
    "DeepseekV3": {
        **SIZES,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
    },
    "Ernie4_5": HEADS_OF_16,
    "Exaone4": {**HEADS_OF_16, "sliding_window": 6},
    "Falcon": SIZES,
    "GPT2": GPT2_LIKE,
    "GPTBigCode": GPT2_LIKE,
    "GPTJ": {**GPT2_LIKE, "rotary_dim": 8},
    "GPTNeoX": SIZES,
    "Gemma": HEADS_OF_16,
    "Gemma2": {**HEADS_OF_16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "Glm": HEADS_OF_16,
    "Glm4": HEADS_OF_16,
    "GptOss": {**HEADS_OF_16, **EXPERTS, "sliding_window": 6},
    "Granite": GROUPED,
    "GraniteMoe": {**GROUPED, **EXPERTS},
    "Helium": HEADS_OF_16,
    "HunYuanDenseV1": HEADS_OF_16,
    "Llama": GROUPED,
    "Llama4Text": {
        **HEADS_OF_16,
        **EXPERTS,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 96,
    },
    "Mistral": {**GROUPED, "sliding_window": 7},
    "Mixtral": {**GROUPED, **EXPERTS},
    "Nemotron": GROUPED,
    "OPT": {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 128,
        "init_std": 0.4,
    },
    "Olmo": GROUPED,
    "Olmo2": GROUPED,
    "Olmo3": {**GROUPED, "sliding_window": 6},
    "Persimmon": SIZES,
    "Phi": GROUPED,
    "Phi3": GROUPED,
    "Qwen2": GROUPED,
    "Qwen2Moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3": HEADS_OF_16,
    "Qwen3Moe": {**HEADS_OF_16, **EXPERTS},
    "SeedOss": HEADS_OF_16,
    "SmolLM3": GROUPED,
    "StableLm": GROUPED,
    "Starcoder2": {**GROUPED, "sliding_window": 8},
}

# Refused, and what the error says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": (
        {"vocab_size": 256, "hidden_size": 64, "n_head": 4, "n_layer": 2},
        "BloomForCausalLM takes no attention_mask or no position_ids",
    ),
    "FalconH1": (GROUPED, "cannot generate with layers of kind 'hybrid'"),
    "GPTNeo": (
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_heads": 4,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
        },
        "cannot be captured as one graph",
    ),
    "Mamba": (
        {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "MambaForCausalLM takes no attention_mask or no position_ids",
    ),
    "MiniMax": ({**HEADS_OF_16, "num_local_experts": 2}, "layers of kind 'linear_attention'"),
}
