"""Small models of every architecture the compiler must shard, built from configs with seeded random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 0
WIDTH, HEADS, HIDDEN, VOCAB = 64, 4, 128, 500
IDS = torch.arange(2, 12)[None].repeat(2, 1)


@dataclass(frozen=True)
class Entry:
    """How to build one model and its inputs, and what must become of it at two ranks."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    kinds: dict[str, int]  # blocks by kind
    left_alone: tuple[str, ...] = ()  # modules that stay replicated
    dynamic: Any = None  # dynamic_shapes of the inputs
    longer: Callable[[], Any] | None = None  # inputs of another length


def make(name: str) -> nn.Module:
    """The model in eval mode, with one-dimensional parameters moved off their trivial values."""
    torch.manual_seed(SEED)
    model = ZOO[name].build().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def main_output(output: Any) -> torch.Tensor:
    """Logits if there are any, else the first tensor."""
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output[0]


def hf(model_class: str, config_class: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        return getattr(transformers, model_class)(getattr(transformers, config_class)(**options))

    return build


def tokens(length: int = 10, batch: int = 2) -> torch.Tensor:
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def causal(length: int = 10, batch: int = 2) -> dict[str, Any]:
    return {"input_ids": tokens(length, batch), "use_cache": False}


ANY_BATCH_AND_LENGTH = {
    "input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},
    "use_cache": None,
}
DECODER = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2}
GATED = {**DECODER, "intermediate_size": HIDDEN}


def language_model(
    model_class: str,
    config_class: str,
    kinds: dict[str, int],
    left_alone: tuple[str, ...] = (),
    **options: Any,
) -> Entry:
    return Entry(
        hf(model_class, config_class, **options),
        causal,
        kinds,
        left_alone,
        ANY_BATCH_AND_LENGTH,
        lambda: causal(13, 3),
    )


def routers(name: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}.{name}" for i in range(2))


def encoder(
    model_class: str, config_class: str, kinds: dict[str, int], left: tuple[str, ...] = (), **o: Any
) -> Entry:
    return Entry(
        hf(model_class, config_class, **o),
        lambda: {"input_ids": tokens()},
        kinds,
        left,
        {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}},
        lambda: {"input_ids": tokens(13, 3)},
    )


class Attention(nn.Module):
    """nn.MultiheadAttention behind a norm, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attn(y, y, y, need_weights=False)[0]


def encoder_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def features() -> tuple[torch.Tensor]:
    return (torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1)),)


LAYERS2 = {"attention": 2, "mlp": 2}
GATED2 = {"attention": 2, "gated mlp": 2}
EXPERTS = {**GATED, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS2 = {"attention": 2, "experts": 2}
BERT = {**GATED, "max_position_embeddings": 64}
# One table: embedding and head tied. Two: the head has weights of its own.
TIED, UNTIED = {"vocabulary": 1}, {"vocabulary": 2}

ZOO: dict[str, Entry] = {
    "gpt2": language_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**LAYERS2, **TIED},
        n_layer=2,
        n_embd=WIDTH,
        n_head=HEADS,
        n_positions=64,
        vocab_size=VOCAB,
    ),
    "llama": language_model(
        "LlamaForCausalLM", "LlamaConfig", {**GATED2, **UNTIED}, num_key_value_heads=2, **GATED
    ),
    "llama-uneven": language_model(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**GATED2, **UNTIED},
        **{**GATED, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "gemma3": language_model(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GATED2, **TIED},
        tuple(f"model.layers.{i}.self_attn.{kv}_proj" for i in range(2) for kv in "kv"),
        **GATED,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2": language_model(
        "Qwen2ForCausalLM", "Qwen2Config", {**GATED2, **UNTIED}, num_key_value_heads=2, **GATED
    ),
    "qwen3": language_model(
        "Qwen3ForCausalLM", "Qwen3Config", {**GATED2, **UNTIED}, num_key_value_heads=2, head_dim=32, **GATED
    ),
    "phi": language_model("PhiForCausalLM", "PhiConfig", {**LAYERS2, **UNTIED}, **GATED),
    "phi3": language_model(
        "Phi3ForCausalLM", "Phi3Config", {**GATED2, **UNTIED}, num_key_value_heads=2, pad_token_id=0, **GATED
    ),
    "neox": language_model("GPTNeoXForCausalLM", "GPTNeoXConfig", {**LAYERS2, **UNTIED}, **GATED),
    "gemma2": language_model(  # attention spelled out, its scores capped
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GATED2, **TIED},
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
        **GATED,
    ),
    "mixtral": language_model(
        "MixtralForCausalLM", "MixtralConfig", {**EXPERTS2, **UNTIED}, routers("mlp.gate"), **EXPERTS
    ),
    "gpt-oss": language_model(  # attention sinks; experts with biases, gate and up in turn
        "GptOssForCausalLM",
        "GptOssConfig",
        {**EXPERTS2, **UNTIED},
        routers("mlp.router"),
        head_dim=16,
        sliding_window=4,
        pad_token_id=0,
        **EXPERTS,
    ),
    "llama4": language_model(  # complex rotary embeddings; every expert computes every token
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**EXPERTS2, "gated mlp": 2, **UNTIED},
        routers("feed_forward.router"),
        head_dim=16,
        attention_chunk_size=4,
        pad_token_id=0,
        **EXPERTS,
    ),
    "deepseek-v3": language_model(  # latent attention; a dense layer first, then experts and a shared one
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {"attention": 2, "experts": 1, "gated mlp": 2, **UNTIED},
        (
            "model.layers.1.mlp.gate",
            *(f"model.layers.{i}.self_attn.{p}" for i in (0, 1) for p in ("q_a_proj", "kv_a_proj_with_mqa")),
        ),
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        **GATED,
    ),
    "bert": encoder("BertModel", "BertConfig", {**LAYERS2, **TIED}, ("pooler.dense",), **BERT),
    "bert-mlm": encoder(
        "BertForMaskedLM", "BertConfig", {**LAYERS2, **TIED}, ("cls.predictions.transform.dense",), **BERT
    ),
    "distilbert": encoder(
        "DistilBertModel",
        "DistilBertConfig",
        {**LAYERS2, **TIED},
        n_layers=2,
        dim=WIDTH,
        hidden_dim=HIDDEN,
        n_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=64,
    ),
    "t5": Entry(
        hf(
            "T5ForConditionalGeneration",
            "T5Config",
            num_layers=2,
            d_model=WIDTH,
            d_kv=16,
            num_heads=HEADS,
            d_ff=HIDDEN,
            vocab_size=VOCAB,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(5), "use_cache": False},
        {"attention": 6, "mlp": 4, "vocabulary": 1},
    ),
    "whisper": Entry(
        hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            encoder_layers=2,
            decoder_layers=2,
            d_model=WIDTH,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=HIDDEN,
            decoder_ffn_dim=HIDDEN,
            vocab_size=VOCAB,
            max_source_positions=50,
            max_target_positions=64,
            num_mel_bins=20,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        lambda: {
            "input_features": torch.randn(2, 20, 100, generator=torch.Generator().manual_seed(1)),
            "decoder_input_ids": tokens(),
            "use_cache": False,
        },
        {"attention": 6, "mlp": 4, "vocabulary": 1},
        ("model.encoder.conv2",),
    ),
    "vit": Entry(
        hf(
            "ViTModel",
            "ViTConfig",
            image_size=32,
            patch_size=8,
            **{k: v for k, v in GATED.items() if k != "vocab_size"},
        ),
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))},
        LAYERS2,
        ("pooler.dense", "embeddings.patch_embeddings.projection"),
    ),
    "transformer-encoder": Entry(encoder_layers, features, LAYERS2),
    "multihead-attention": Entry(Attention, features, {"attention": 1}),
}
