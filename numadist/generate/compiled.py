"""The step compiled: one graph for reading prompts, one for decoding, over the same weights."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch import Tensor
from torch.fx import GraphModule

from numadist.generate.attention import use_one_token_attention
from numadist.generate.packed import pack_linears, use_int8_linears, use_skinny_linears
from numadist.generate.replay import NewModules, replayed
from numadist.shard.attention import write_attention
from numadist.shard.compiled import freezing

# Checks of every intermediate tensor, in Python: hundreds a step, as long as a small layer.
_OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}


class CompiledStep:
    """Called as the step graph is; its first calls compile: a graph each for one row or more, one token or more.

    No other number of rows, tokens or slots compiles anew.
    """

    def __init__(self, gm: GraphModule, int8: bool = False):
        """Takes `gm` over: its linear layers get packed weights. int8: those of decoding, int8_bytes more."""
        pack_linears(gm)
        write_attention(gm)
        with warnings.catch_warnings():  # torch.export's own, when its result is copied
            warnings.simplefilter("ignore", FutureWarning)
            decode = GraphModule(gm, copy.deepcopy(gm.graph))
        write_attention(decode, one_query=True)
        use_one_token_attention(decode)
        self.int8_bytes = use_int8_linears(decode) if int8 else 0
        use_skinny_linears(decode)
        self.prefill, self.decode = (
            torch.compile(gm, options=_OPTIONS),
            torch.compile(decode, options=_OPTIONS),
        )
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
