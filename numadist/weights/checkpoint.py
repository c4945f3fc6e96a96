"""What a checkpoint is, whatever its format: named tensors of which a rank reads its part."""

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numadist.errors import ShardError
from numadist.kernels.quantized import Quantized
from numadist.log import get_logger
from numadist.sharding.placement import Cut, Shard

log = get_logger(__name__)

_NEAREST = 3


class Checkpoint(ABC):
    """Tensors under the names of the model's parameters; `_entries` says where each lies.

    model: whose checkpoint it is. Its base_model_prefix may stand before a name or not, as in transformers; no other
    name than that is taken for a parameter.
    """

    def __init__(self, path: str | Path, model: torch.nn.Module | None = None):
        self.path = Path(path)
        self._entries: dict[str, Any] = {}
        self._prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]

    def names(self) -> list[str]:
        return list(self._entries)

    def find(self, candidates: Iterable[str]) -> str | None:
        """The tensor that has one of these names, with the model's prefix or without; None if there is none."""
        for name in candidates:
            for spelled in (name, self._prefix + name, name.removeprefix(self._prefix)):
                if spelled in self._entries:
                    return spelled
        return None

    def found(self, candidates: Iterable[str]) -> str:
        """The same. Raises: ShardError that names what was looked for, and the nearest names."""
        names = list(candidates)
        name = self.find(names)
        if name is None:
            near = difflib.get_close_matches(names[0], self._entries, n=_NEAREST)
            raise ShardError(
                f"{self.path} has no tensor named {' or '.join(names)}; "
                f"it has {len(self._entries)} others, the nearest are {', '.join(near) or 'not near'}"
            )
        return name

    def warn_of_unused(self, known: Iterable[str]) -> None:
        """One warning for all tensors that the model has no parameter or buffer for."""
        used = {self.find([name]) for name in known}
        unused = [n for n in self._entries if n not in used and not any(i.search(n) for i in self._ignored)]
        if unused:
            shown = ", ".join(unused[:_NEAREST]) + (" ..." if len(unused) > _NEAREST else "")
            log.warning("%s has %d tensors that the model does not use: %s", self.path, len(unused), shown)

    @abstractmethod
    def read_into(self, out: Tensor, name: str, shard: Shard, rank: int) -> None:
        """Fill `out` with what `rank` holds of tensor `name`, converting to out's dtype.

        Raises: ShardError for a wrong shape.
        """

    def has_codes(self, name: str) -> bool:
        """Whether the file keeps the tensor quantized, in whatever format."""
        return False

    def read_codes(
        self, name: str, shape: tuple[int, ...], is_transposed: bool, rows: Cut | None
    ) -> Quantized | None:
        """Outputs of a weight as the file's own codes, of all its inputs; None where the file has plain numbers.

        shape: of the parameter, [K, N] where it is transposed, with the experts of a mixture before. rows: the outputs
        that are wanted, counted through all experts; None: all.
        Raises: ShardError for a wrong shape, or codes that stand for no numbers.
        """
        return None

    def _check_shape(self, out: Tensor, name: str, shape: tuple[int, ...], shard: Shard, rank: int) -> None:
        local = shard.local_shape(shape, rank) if len(shape) == out.dim() else None
        if local != tuple(out.shape):
            raise ShardError(
                f"{self.path}: {name} has shape {shape}, of which rank {rank} would hold {local or shape}, "
                f"but the model's parameter is {tuple(out.shape)}; the checkpoint is for another model"
            )
