"""Which format a checkpoint has."""

import json
from pathlib import Path
from typing import Any

import torch

from numadist.weights.checkpoint import Checkpoint
from numadist.weights.conversions import conversions_of
from numadist.weights.gguf import GgufCheckpoint
from numadist.weights.packed_integers import scheme_of
from numadist.weights.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: str | Path, model: torch.nn.Module) -> Checkpoint:
    """The checkpoint at path, of the format its name says. Raises: ShardError for a file that is none."""
    if Path(path).suffix == ".gguf":
        return GgufCheckpoint(path, model)
    return SafetensorsCheckpoint(
        path, conversions_of(model), model, scheme_of(_quantization_config(Path(path)), path)
    )


def _quantization_config(folder: Path) -> dict[str, Any] | None:
    """What the config of a folder says of it; a file alone has none."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    found: dict[str, Any] | None = config.get("quantization_config") if isinstance(config, dict) else None
    return found
