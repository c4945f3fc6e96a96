"""The KV tensors of one rank: its heads only, in pages of its node, one row a sequence."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from numadist.errors import GenerateError
from numadist.memory.local import local_empty
from numadist.memory.pages import page_nodes

# Attention reads the slots in use, rounded up to this.
SLOT_STEP = 64


def round_up(n: int, step: int) -> int:
    return math.ceil(n / step) * step


class KvTensors:
    """Keys and values of all layers, [rows, H, S, size] each; every tensor has pages of its own.

    Rows in use are the first ones, so that a batch is a view. Slots never written hold zeros: a masked slot has weight
    0, which garbage that is not a number would survive.
    """

    def __init__(self, shapes: Sequence[tuple[int, int, torch.dtype]], num_rows: int, num_slots: int):
        """shapes: (heads on this rank, size, dtype) of every tensor."""
        self.num_rows, self.num_slots = num_rows, num_slots
        self.tensors = [
            local_empty((num_rows, heads, num_slots, size), dtype).zero_() for heads, size, dtype in shapes
        ]
        self._views: dict[tuple[int, int, int], list[Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def page_nodes(self) -> dict[int, int]:
        """{node: pages} of all tensors, asked of the kernel."""
        found: Counter[int] = Counter()
        for t in self.tensors:
            found.update(page_nodes(t))
        return dict(sorted(found.items()))

    def slots_for(self, num_tokens: int) -> int:
        """Slots a graph must see for rows of up to `num_tokens` tokens and one spare. Raises: GenerateError."""
        if num_tokens + 1 > self.num_slots:
            raise GenerateError(
                f"a sequence of {num_tokens} tokens does not fit into {self.num_slots} slots, one of them spare"
            )
        return min(round_up(num_tokens + 1, SLOT_STEP), self.num_slots)

    def view(self, first_row: int, num_rows: int, num_slots: int) -> list[Tensor]:
        """These rows and their first slots, of every tensor."""
        key = (first_row, num_rows, num_slots)
        if key not in self._views:
            if len(self._views) > 1024:  # far more than one batch size uses
                self._views.clear()
            self._views[key] = [t[first_row : first_row + num_rows, :, :num_slots] for t in self.tensors]
        return self._views[key]

    def move_row(self, source: int, target: int, num_tokens: int) -> None:
        for t in self.tensors:
            t[target, :, :num_tokens].copy_(t[source, :, :num_tokens])
