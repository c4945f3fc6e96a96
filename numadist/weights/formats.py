"""Which format a checkpoint has."""

from pathlib import Path

import torch

from numadist.weights.checkpoint import Checkpoint
from numadist.weights.conversions import conversions_of
from numadist.weights.gguf import GgufCheckpoint
from numadist.weights.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: str | Path, model: torch.nn.Module) -> Checkpoint:
    """The checkpoint at path, of the format its name says. Raises: ShardError for a file that is none."""
    if Path(path).suffix == ".gguf":
        return GgufCheckpoint(path, model)
    return SafetensorsCheckpoint(path, conversions_of(model), model)
