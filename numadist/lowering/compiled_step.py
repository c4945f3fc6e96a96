"""The step compiled: one program for reading prompts, one for decoding, over the same weights."""

from collections.abc import Sequence

from torch import Tensor
from torch.fx import GraphModule

from numadist.graph.repeats import divide
from numadist.lowering.compiled_parts import Dims, Program, compile_parts
from numadist.lowering.recorded_step import Step, replayed

# What the code is tuned for, so that any first call makes the same code.
_HINTS = {"rows": 8, "tokens": 128, "slots": 512}


class CompiledStep:
    """Called as the step graph is; first calls compile: a program each for one row or more, one token or more.

    No other number of rows, tokens or slots compiles anew.
    """

    def __init__(self, prefill: GraphModule, decode: GraphModule):
        """prefill, decode: the step for any number of tokens, and for one token a row, over the same weights."""
        self.prefill, self.decode = prefill, decode
        self._divided = {one_token: divide(gm) for one_token, gm in ((False, prefill), (True, decode))}
        self.programs: dict[tuple[bool, bool, bool], list[Program]] = {}
        self._running: dict[tuple[bool, bool, bool], Program] = {}
        self._ready: dict[tuple[bool, bool, bool], Step] = {}

    def __call__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        num_rows, num_tokens, num_slots = *tokens.shape, keys[0].shape[2]
        # All slots there are make tensors in one piece, which is another layout.
        kind = num_rows == 1, num_tokens == 1, keys[0].stride(1) == num_slots * keys[0].shape[3]
        fixed = dict(zip(_HINTS, kind, strict=True))
        sizes = {
            name: size
            for name, size in zip(_HINTS, (num_rows, num_tokens, num_slots), strict=True)
            if not fixed[name]
        }
        inputs = tokens, positions, slots, keys, values
        if kind in self._running and self._running[kind].holds_for([*sizes.values()]):
            return self._ready[kind](*inputs)
        programs = self.programs.setdefault(kind, [])
        right = next((p for p in programs if p.holds_for([*sizes.values()])), None)
        if right is None:
            hints = sizes if programs else {name: _HINTS[name] for name in sizes}
            right = self._compiled(kind[1], hints, (tokens, positions, slots, *keys, *values))
            programs.append(right)
        step = _Flat(right)
        self._running[kind] = right
        self._ready[kind] = replayed(step, right.modules) if kind[1] else step
        return step(*inputs)

    def _compiled(self, one_token: bool, hints: dict[str, int], inputs: Sequence[Tensor]) -> Program:
        def named(of: dict[int, str]) -> Dims:
            return {dim: name for dim, name in of.items() if name in hints}

        small, kv = named({0: "rows", 1: "tokens"}), named({0: "rows", 2: "slots"})
        dims = [small] * 3 + [kv] * (len(inputs) - 3)
        gm = self.decode if one_token else self.prefill
        return compile_parts(gm, self._divided[one_token], inputs, dims, hints)


class _Flat:
    """A program called as the step is."""

    def __init__(self, program: Program):
        self.program = program

    def __call__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        (logits,) = self.program([tokens, positions, slots, *keys, *values])
        return logits
