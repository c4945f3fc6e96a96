"""A model's graph compiled a layer once, with linear layers on weights packed once; called as the model is."""

import time
from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.fx._pytree as fx_pytree
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_unflatten

from numadist.graph import query
from numadist.graph.modes import graph_draws_numbers
from numadist.graph.repeats import Division, divide
from numadist.log import get_logger
from numadist.lowering.compiled_parts import Dims, Program, compile_parts

log = get_logger(__name__)

_GUARDS = "_guards_fn"


class CompiledModel:
    """Compiles at its first call, which `pack` precedes, and for inputs whose layout or static sizes are new."""

    def __init__(self, gm: GraphModule, pack: Callable[[GraphModule], None], name: str):
        """pack: rewrites the graph on packed weights, which frees the plain ones. name: for messages."""
        self._gm, self._pack, self._name = gm, pack, name
        self._guards = next((getattr(gm, _GUARDS) for n in gm.graph.nodes if n.target == _GUARDS), None)
        self._names = list(gm.graph._codegen.pytree_info.orig_args)  # type: ignore[attr-defined]
        self._num_positional = gm._in_spec.child(0).num_children
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._dims = [_named_dims(n) or {} for n in inputs]
        self._division: Division | None = None
        self._programs: dict[Any, list[tuple[list[tuple[int, int]], Program]]] = {}

    @property
    def programs(self) -> list[Program]:
        """What was compiled so far."""
        return [program for found in self._programs.values() for _, program in found]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = self._flat(args, kwargs)
        if self._guards is not None:
            self._guards(*flat)
        with torch.no_grad():
            outputs = self._program(flat)(flat)
        spec: Any = self._gm._out_spec
        return tree_unflatten(outputs, spec)

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        given = [*args, *(kwargs[name] for name in self._names[len(args) :])]
        positional = given[: self._num_positional]
        named = dict(zip(self._names[self._num_positional :], given[self._num_positional :], strict=True))
        return list(fx_pytree.tree_flatten_spec((positional, named), self._gm._in_spec))

    def _program(self, flat: list[Any]) -> Program:
        found = self._programs.setdefault(self._layout(flat), [])
        for places, program in found:
            if program.holds_for([flat[i].shape[d] for i, d in places]):
                return program
        begin = time.monotonic()
        if self._division is None:
            self._pack(self._gm)
            self._division = divide(self._gm)
        places_of: dict[str, tuple[int, int]] = {}
        dims: list[Dims] = []
        for i, (value, names) in enumerate(zip(flat, self._dims, strict=True)):
            dims.append({d: name for d, name in names.items() if value.shape[d] != 1})
            for d, name in dims[-1].items():
                places_of.setdefault(name, (i, d))
        hints = {name: flat[i].shape[d] for name, (i, d) in places_of.items()}
        log.info(
            "compiling %s for inputs %s", self._name, [list(v.shape) for v in flat if isinstance(v, Tensor)]
        )
        program = compile_parts(self._gm, self._division, flat, dims, hints)
        parts, calls = program.num_compiled, len(program.modules)
        log.info("compiled %d parts for %d calls in %.1f s", parts, calls, time.monotonic() - begin)
        found.append((list(places_of.values()), program))
        return program

    def _layout(self, flat: list[Any]) -> Any:
        """What of the inputs is written into code."""
        return tuple(
            (
                value.dtype,
                tuple(None if d in names and n != 1 else n for d, n in enumerate(value.shape)),
                None if value.is_contiguous() else value.stride(),
            )
            if isinstance(value, Tensor)
            else value
            for value, names in zip(flat, self._dims, strict=True)
        )


def layers_repeat(gm: GraphModule) -> bool:
    """Whether CompiledModel pays for the graph, and can: it must be one for inference, on tensors of known dims."""
    if graph_draws_numbers(gm) or not hasattr(gm.graph._codegen, "pytree_info"):
        return False
    for node in gm.graph.nodes:
        if node.op == "placeholder" and _named_dims(node) is None:
            return False
    try:
        division = divide(gm)
    except ValueError as reason:
        log.debug("no layers are looked for: the graph has a %s", reason)
        return False
    return len(division.parts) < len(division.calls)


def _named_dims(node: Node) -> dict[int, str] | None:
    """The input's dims whose sizes may change, by the names of their symbols; None for what cannot be compiled."""
    value = query.value(node)
    if not isinstance(value, Tensor):
        used = [user for user in node.users if user.target != _GUARDS]
        return None if used else {}
    sizes: list[Any] = list(value.shape)
    found = {d: n.node.expr for d, n in enumerate(sizes) if not query.is_static(n)}
    if value.layout != torch.strided or not all(isinstance(e, sympy.Symbol) for e in found.values()):
        return None
    return {d: str(e) for d, e in found.items()}
