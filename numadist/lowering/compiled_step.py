"""The step compiled: one graph for reading prompts, one for decoding, over the same weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch import Tensor
from torch.fx import GraphModule

from numadist.lowering.freezing import freezing
from numadist.lowering.recorded_step import NewModules, replayed

# Checks of every intermediate tensor, in Python: hundreds a step, as long as a small layer.
_OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}


class CompiledStep:
    """Called as the step graph is; its first calls compile: a graph each for one row or more, one token or more.

    No other number of rows, tokens or slots compiles anew.
    """

    def __init__(self, prefill: GraphModule, decode: GraphModule):
        """prefill, decode: the step for any number of tokens, and for one token a row, over the same weights."""
        packed = {id(t) for t in prefill.buffers()}
        own = [t for t in decode.buffers() if id(t) not in packed]
        self.decode_bytes = sum(
            t.numel() * t.element_size() for t in own
        )  # of weights that only decoding has
        self.prefill = torch.compile(prefill, options=_OPTIONS)
        self.decode = torch.compile(decode, options=_OPTIONS)
        self._ready: dict[tuple[bool, bool], Any] = {}

    def __call__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        one_row, one_token = tokens.shape[0] == 1, tokens.shape[1] == 1
        inputs: Any = (tokens, positions, slots, keys, values)
        if (ready := self._ready.get((one_row, one_token))) is not None:
            return ready(*inputs)
        run = _frozen(self.decode if one_token else self.prefill)
        for t in (tokens, positions, slots):
            _mark_dynamic(t, [d for d, one in ((0, one_row), (1, one_token)) if not one])
        for t in (*keys, *values):
            _mark_dynamic(t, [2] if one_row else [0, 2])
        modules = NewModules()
        # Sizes that happen to be equal in this call are no law.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            logits = run(*inputs)
        self._ready[one_row, one_token] = replayed(run, modules.found()) if one_token else run
        return logits


def _frozen(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Packed weights must be constants of whatever is compiled, and Dynamo asks a global setting for that."""

    def step(*inputs: Any) -> Tensor:
        with freezing():
            return run(*inputs)

    return step


def _mark_dynamic(t: Tensor, dims: list[int]) -> None:
    for dim in dims:
        torch._dynamo.mark_dynamic(t, dim)
