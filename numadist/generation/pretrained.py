"""A model as Hugging Face saves it, or a GGUF file: its configs, its parameters without memory, its tokenizer.

Weights are not read here: each rank reads its slices of them later. Needs the extra `models`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from numadist.errors import GenerateError
from numadist.weights.fake import empty_parameters
from numadist.weights.gguf_config import gguf_config, gguf_tokenizer
from numadist.weights.hugging_face import quiet_transformers
from numadist.weights.packed_integers import scheme_of


@dataclass(frozen=True)
class Pretrained:
    """model: a causal language model whose parameters have no memory. weights: what holds their values."""

    model: torch.nn.Module
    weights: Path


def open_pretrained(path: str | Path, dtype: torch.dtype | None = None) -> Pretrained:
    """The model at a path: a folder with config.json and safetensors, or a .gguf file.

    dtype: of the parameters; None takes what a folder's config says, and float32 for a GGUF file.
    Raises: GenerateError for a path that holds no such model, ShardError for a quantization that we do not read.
    """
    place = _place(path)
    transformers = quiet_transformers(GenerateError)
    config = _found(place, "config")
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        scheme_of(quantized if isinstance(quantized, dict) else quantized.to_dict(), path)
        del config.quantization_config  # how the file is, not what the model computes
    if dtype is None:
        dtype = torch.float32 if place.is_gguf else (getattr(config, "dtype", None) or torch.float32)
    with empty_parameters():
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        except ValueError as error:  # its text lists all models of transformers
            raise GenerateError(
                f"{path}: {type(config).__name__} is no causal language model of transformers"
            ) from error
    if (place.folder / "generation_config.json").exists() and not place.is_gguf:
        model.generation_config = transformers.GenerationConfig.from_pretrained(place.folder)
    return Pretrained(model, Path(path))


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer that lies with the model. Raises: GenerateError where there is none."""
    quiet_transformers(GenerateError)
    return _found(_place(path), "tokenizer")


@dataclass(frozen=True)
class _Place:
    folder: Path
    file: str | None  # a GGUF file in it

    @property
    def is_gguf(self) -> bool:
        return self.file is not None


def _place(path: str | Path) -> _Place:
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _Place(path.parent, path.name)
    if path.is_dir():
        if (path / "config.json").exists():
            return _Place(path, None)
        files = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; of its GGUF files take one: {', '.join(files)}" if files else ""
        raise GenerateError(f"{path} has no config.json{hint}")
    what = "neither a folder nor a .gguf file" if path.exists() else "not there"
    raise GenerateError(
        f"{path} is {what}; a model is a folder as save_pretrained writes it, or a .gguf file"
    )


def _found(place: _Place, what: str) -> Any:
    """Its config or its tokenizer."""
    try:
        if place.file is not None:
            of_file = {"config": gguf_config, "tokenizer": gguf_tokenizer}[what]
            return of_file(place.folder / place.file)
        auto_class = getattr(quiet_transformers(), f"Auto{what.capitalize()}")
        return auto_class.from_pretrained(place.folder, local_files_only=True)
    except Exception as error:  # transformers raises of every kind for what it cannot read
        where = place.folder / place.file if place.file else place.folder
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise GenerateError(f"{where}: no {what} that transformers reads: {first}") from error
