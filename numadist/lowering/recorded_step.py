"""A compiled decode step whose native calls are repeated without Python, as CUDA graphs repeat a GPU's kernels.

A step of GPT-2 makes 130 native calls of 10 to 100 us; Python between them takes a quarter of its time, because reading
the weights has emptied the caches of everything else. The calls depend on nothing but the sizes and addresses of the
step's inputs. So the first step with given ones is recorded, and later ones are a loop in C over the recorded calls,
with new inputs written where the old ones were.

What can be recorded is decided by reading the code Inductor made: kernels of its own, and operators that note their
calls (numadist/_native_replay.py). Code with any other call is run as it is.
"""

import ast
import inspect
import re
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from numadist._native_replay import Recording, active, recording, symbol_of
from numadist.log import get_logger

log = get_logger(__name__)

# Recordings kept, each with the step's intermediate results: rows come and go, and slots grow by 64.
MAX_RECORDINGS = 8

_OPERATORS = (
    "skinny_linear",
    "half_linear",
    "quantized_linear",
    "quantized_experts",
    "quantized_embedding",
    "attention",
    "all_reduce_",
)
_RECORDED = {f"torch.ops.numadist.{op}.default" for op in _OPERATORS}
# What generated code calls around kernels that touches no data.
_HARMLESS = {"empty_strided_cpu", "reinterpret_tensor", "args.clear"}
_ASKS = re.compile(r"arg\d+_1\.(size|stride)")  # of an input
_ENTRY = "kernel"  # the C name of every kernel of Inductor

Step = Callable[..., Tensor]


class ReplayedStep:
    """step(tokens, positions, slots, keys, values), of one token a row, recorded for every size it is called with."""

    def __init__(self, step: Step, modules: Sequence[ModuleType]):
        """modules: the generated code that `step` runs, one entry a time that it runs; see why_not."""
        self._step, self._modules = step, list(dict.fromkeys(modules))
        calls = {module: _num_native(module) for module in self._modules}
        self._num_calls = sum(calls[module] for module in modules)
        self._recorded: OrderedDict[tuple[int, ...], tuple[list[Tensor], Tensor, Recording]] = OrderedDict()
        self.num_recorded = self.num_replayed = 0
        self.refused = ""  # why no step is recorded any more

    def __call__(self, *inputs: Any) -> Tensor:
        """The logits, valid until the next call."""
        if self.refused:
            return self._step(*inputs)
        *small, keys, values = inputs
        key = (*small[0].shape, keys[0].shape[2], keys[0].data_ptr(), torch.get_num_threads())
        found = self._recorded.get(key)
        if found is None:
            return self._record(key, small, keys, values)
        self._recorded.move_to_end(key)
        own, logits, calls = found
        for target, source in zip(own, small, strict=True):
            target.copy_(source)
        calls.replay()
        self.num_replayed += 1
        return logits

    def _record(
        self, key: tuple[int, ...], small: list[Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        # Strides too: another layout is another input for the compiler.
        own = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in small]
        with recording() as calls, _noting(self._modules):
            logits = self._step(*own, keys, values)
        if not calls.refused and len(calls) != self._num_calls:
            calls.refused = f"{len(calls)} calls were made, {self._num_calls} are in the code: other code ran"
        elif not calls.refused and not calls.holds(logits):
            calls.refused = "the result is a copy"
        if calls.refused:
            log.warning("decode steps go through Python, which is slower: %s", calls.refused)
            self.refused = calls.refused
            return logits
        self._recorded[key] = own, logits, calls
        self.num_recorded += 1
        if len(self._recorded) > MAX_RECORDINGS:
            self._recorded.popitem(last=False)
        return logits


def replayed(step: Step, modules: Sequence[ModuleType | None]) -> Step:
    """The step without Python between its kernels, or as it is where that cannot be.

    modules: the generated code that the step runs, one entry a time that it runs.
    """
    known = [m for m in modules if m is not None]
    reasons = [why_not(m) for m in dict.fromkeys(known)] + ["part of it is not known"] * (
        len(known) < len(modules)
    )
    if reason := next(filter(None, reasons), ""):
        log.debug("decode steps are not recorded: %s", reason)
        return step
    return ReplayedStep(step, known)


def why_not(module: ModuleType) -> str:
    """What in the generated code cannot be recorded; empty if all of it can."""
    other = set(_called(module)) - _RECORDED - _HARMLESS - set(_kernels(module))
    other = {name for name in other if not _ASKS.fullmatch(name)}
    return f"it calls {', '.join(sorted(other))}" if other else ""


def _num_native(module: ModuleType) -> int:
    kernels = _kernels(module)
    return sum(name in kernels or name in _RECORDED for name in _called(module))


def _called(module: ModuleType) -> list[str]:
    """Names of what the generated code calls, one entry a call: it has no branches and no loops."""
    (code,) = ast.parse(textwrap.dedent(inspect.getsource(module.Runner.call))).body
    return [ast.unparse(node.func) for node in ast.walk(code) if isinstance(node, ast.Call)]


def _kernels(module: ModuleType) -> dict[str, Any]:
    """The module's compiled kernels by name: functions of extension modules of their own."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isbuiltin(value) and value.__name__ == _ENTRY and isinstance(value.__self__, ModuleType)
    }


@contextmanager
def _noting(modules: Sequence[ModuleType]) -> Iterator[None]:
    """The modules' kernels note their calls, and their buffers are kept, on this thread's recording."""
    old: list[tuple[ModuleType, dict[str, Any]]] = []
    try:
        for module in modules:
            replaced: dict[str, Any] = {name: _noted(kernel) for name, kernel in _kernels(module).items()}
            replaced["empty_strided_cpu"] = _kept(module.empty_strided_cpu)
            old.append((module, {name: getattr(module, name) for name in replaced}))
            vars(module).update(replaced)
        yield
    finally:
        for module, before in old:
            vars(module).update(before)


def _noted(kernel: Any) -> Callable[..., None]:
    address = symbol_of(kernel.__self__.__file__, _ENTRY)

    def run(*args: Any) -> None:
        if (calls := active()) is not None:
            calls.note(address, args)
        kernel(*args)

    return run


def _kept(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any) -> Tensor:
        new = empty(*args)
        return new if (calls := active()) is None else calls.keep(new)

    return make
