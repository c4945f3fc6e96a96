"""What a checkpoint is, whatever its format: named tensors of which a rank reads its part."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from numadist.errors import ShardError
from numadist.sharding.placement import Shard


class Checkpoint(ABC):
    """Tensors under the names of the model's parameters; `_entries` says where each lies."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._entries: dict[str, Any] = {}

    def names(self) -> list[str]:
        return list(self._entries)

    def find(self, candidates: Iterable[str]) -> str:
        """The tensor one of these names means, also where the checkpoint has a prefix more or less.

        Raises: ShardError naming what was looked for.
        """
        wanted = list(candidates)
        for name in wanted:
            if name in self._entries:
                return name
        for name in wanted:
            near = [n for n in self._entries if n.endswith("." + name) or name.endswith("." + n)]
            if len(near) == 1:
                return near[0]
        raise ShardError(
            f"{self.path} has no tensor named {' or '.join(wanted)}; it has {len(self._entries)} others"
        )

    @abstractmethod
    def read_into(self, out: Tensor, name: str, shard: Shard, rank: int) -> None:
        """Fill `out` with what `rank` holds of tensor `name`, converting to out's dtype.

        Raises: ShardError for a wrong shape.
        """

    def _check_shape(self, out: Tensor, name: str, shape: tuple[int, ...], shard: Shard, rank: int) -> None:
        local = shard.local_shape(shape, rank)
        if local != tuple(out.shape):
            raise ShardError(
                f"{self.path}: {name} has shape {shape}, of which rank {rank} would hold {local}, "
                f"but the model's parameter is {tuple(out.shape)}; the checkpoint is for another model"
            )
