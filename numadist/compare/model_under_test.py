"""The model that all variants of a comparison run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelUnderTest:
    """A model of numadist.models (or module:function) with room for `longest` positions."""

    model: str
    dtype: str
    longest: int = 0

    def load(
        self, batch: int, seq: int, kept: "torch.nn.Module | None" = None
    ) -> "tuple[torch.nn.Module, dict[str, Any]]":
        """The unsharded model and its keyword inputs for one shape. kept: loaded before, to use again if it fits."""
        import torch

        from numadist import models

        if kept is not None and ":" not in self.model and models.has_room(kept, seq):
            return kept, models.prefill_inputs(kept, batch, seq)
        return models.workload(self.model, batch, seq, getattr(torch, self.dtype), self.longest)
