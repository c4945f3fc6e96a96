"""A graph compiled part by part, each once: a model's layer is compiled once, however many layers there are.

Parts (numadist/graph/repeats.py) take weights and all else they read as inputs, so torch's cache of compiled graphs
keeps them, for other processes and ranks too. Between parts there is a loop in Python, which recorded steps hide.
"""

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

from numadist.graph.model_key import files_digest
from numadist.graph.repeats import Division, tensor_of
from numadist.log import get_logger
from numadist.lowering.one_compiler import shared_out
from numadist.lowering.packed_ops import write_packed_linears

log = get_logger(__name__)

# Checks of every intermediate tensor, in Python: hundreds a step, as long as a small layer.
_OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False, "freezing": False}
# Dynamo and Inductor have global settings; ranks may be threads.
_lock = threading.RLock()

# Of one input: names of the dims whose sizes change between calls.
Dims = Mapping[int, str]


@dataclass(frozen=True)
class _Step:
    """One call of a part. inputs: places among its arguments and the slots that go there; the others are weights."""

    run: Any
    arguments: list[Any]
    inputs: list[tuple[int, int]]
    outputs: list[int]
    last_used: list[int]  # slots that nobody reads any more


class Program:
    """Called with the graph's inputs as a flat list; returns its outputs as one. Inputs are read, never kept."""

    def __init__(self, num_slots: int, numbers: list[Any], steps: list[_Step], outputs: list[Any]):
        """numbers: (slot, function, arguments) each, where a Slot stands for what is in it."""
        self._num_slots, self._numbers, self._steps, self._outputs = num_slots, numbers, steps, outputs
        self.modules: list[ModuleType | None] = []  # generated code that runs, one entry a call
        self.num_compiled = 0  # different parts
        self._holds: Any = None
        self._seen: dict[tuple[int, ...], bool] = {}

    def holds_for(self, sizes: Sequence[int]) -> bool:
        """Whether the code is right for these sizes, of the names it was compiled with, in their order."""
        key = tuple(sizes)
        if (known := self._seen.get(key)) is None:
            known = self._seen[key] = self._holds is None or bool(self._holds(key))
        return known

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        slots = [*inputs, *[None] * (self._num_slots - len(inputs))]
        for slot, function, arguments in self._numbers:
            slots[slot] = function(*[slots[a.slot] if isinstance(a, _Slot) else a for a in arguments])
        for step in self._steps:
            arguments = step.arguments.copy()
            for place, slot in step.inputs:
                arguments[place] = slots[slot]
            for slot, value in zip(step.outputs, step.run(*arguments), strict=True):
                slots[slot] = value
            for slot in step.last_used:
                slots[slot] = None
        return [slots[o.slot] if isinstance(o, _Slot) else o for o in self._outputs]


@dataclass(frozen=True)
class _Slot:
    slot: int


def compile_parts(
    gm: GraphModule,
    division: Division,
    inputs: Sequence[Tensor],
    dims: Sequence[Dims],
    hints: Mapping[str, int],
) -> Program:
    """Compile what is different among the parts, for inputs like these; without gradients.

    hints: sizes of named dims that the code is tuned for; any others are right too, see Program.holds_for.
    """
    with _lock, torch.no_grad():
        return _Compiler(gm, division, hints).program(inputs, dims)


class _Compiler:
    def __init__(self, gm: GraphModule, division: Division, hints: Mapping[str, int]):
        self.gm, self.division = gm, division
        self.env = ShapeEnv(duck_shape=False)  # equal sizes are no law
        self.mode = FakeTensorMode(shape_env=self.env)
        self.sizes = self._symbols(hints)
        self.fakes: dict[Any, Any] = {}  # of nodes; of tensors of the graph's own by id
        self.slots: dict[Node, int] = {}
        self.compiled: dict[Any, tuple[Any, list[Any]]] = {}

    def _symbols(self, hints: Mapping[str, int]) -> dict[str, Any]:
        if not hints:
            return {}
        carrier = torch.empty(tuple(hints.values()), device="meta")
        context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(hints))
        fake = self.mode.from_tensor(carrier, symbolic_context=context, source=ConstantSource("sizes"))
        return dict(zip(hints, fake.shape, strict=True))

    def program(self, inputs: Sequence[Tensor], dims: Sequence[Dims]) -> Program:
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        for node, value, names in zip(placeholders, inputs, dims, strict=True):
            self.fakes[node] = self._fake_input(value, names) if isinstance(value, Tensor) else value
            self._slot(node)
        numbers = [self._number(node) for node in self.division.numbers]
        calls = [(call, self._kind(call)) for call in self.division.calls]
        for call, _ in calls:
            for node in call.outputs:
                self._slot(node)
        output = next(iter(reversed(self.gm.graph.nodes)))
        outputs = [self._at(o) for o in torch.utils._pytree.tree_leaves(output.args[0])]
        used_last = self._used_last(output)
        wanted = {kind: f"{self.division.text[kind[0]]}\n{kind[1]}" for _, kind in calls}
        ready = shared_out(wanted, lambda kind: self._compile(*kind))
        steps = [self._step(call, ready[kind][0], used_last[i]) for i, (call, kind) in enumerate(calls)]
        program = Program(len(self.slots), numbers, steps, outputs)
        program.modules = [ready[kind][1] for _, kind in calls]
        program.num_compiled = len(ready)
        program._holds = self._guards()
        return program

    def _guards(self) -> Any:
        """What compilation took for granted of the named sizes, as a function of them; None: nothing."""
        symbols = list(self.sizes.values())
        text = self.env.produce_guards_expression(symbols) if symbols else None
        if not text:
            return None
        log.debug("compiled for sizes %s where %s", list(self.sizes), text)
        return lambda sizes: self.env.evaluate_guards_expression(text, list(sizes))

    def _slot(self, node: Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def _at(self, value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        return tensor_of(self.gm, value) if value.op == "get_attr" else _Slot(self._slot(value))

    def _fake_input(self, t: Tensor, names: Dims) -> Tensor:
        shape: list[Any] = [self.sizes[names[d]] if d in names else n for d, n in enumerate(t.shape)]
        with self.mode:
            if t.is_contiguous():
                return torch.empty(shape, dtype=t.dtype)
            return torch.empty_strided(shape, t.stride(), dtype=t.dtype)

    def _number(self, node: Node) -> tuple[int, Any, list[Any]]:
        args = map_arg(node.args, lambda n: self.fakes[n])
        self.fakes[node] = node.target(*args)  # type: ignore[operator]
        return self._slot(node), node.target, [self._at(a) for a in node.args]

    def _fake(self, node: Node) -> Any:
        if node.op != "get_attr":
            return self.fakes[node]
        t = tensor_of(self.gm, node)
        if id(t) not in self.fakes:
            with self.mode:
                strides = torch.empty(t.shape, device="meta").stride() if t.is_mkldnn else t.stride()
                self.fakes[id(t)] = torch.empty_strided(t.shape, strides, dtype=t.dtype)
        return self.fakes[id(t)]

    def _kind(self, call: Any) -> Any:
        """The call's part and what its code depends on besides; its results become known."""
        values = [self._fake(node) for node in call.inputs]
        kind = call.part, tuple(_described(v) for v in values)
        if kind not in self.compiled:
            part = self._traced(self.division.parts[call.part], values)
            self.compiled[kind] = part, values
        part, _ = self.compiled[kind]
        for node, value in zip(call.outputs, part.results, strict=True):
            self.fakes[node] = value
        return kind

    def _traced(self, part: GraphModule, values: list[Any]) -> "_Traced":
        """A copy of the part that knows what its nodes are."""
        copy = GraphModule(torch.nn.Module(), torch.fx.Graph())
        copy.graph.output(copy.graph.graph_copy(part.graph, {}))
        with self.mode:
            results = _Noting(copy).run(*values)
        write_packed_linears(copy)
        return _Traced(copy, results)

    def _compile(self, part: int, described: Any) -> tuple[Any, ModuleType | None]:
        traced, values = self.compiled[part, described]
        found: list[Any] = []

        def inner(gm: GraphModule, example_inputs: Any, **options: Any) -> Any:
            found.append(compile_fx_inner(gm, example_inputs, **options))
            return found[-1]

        with (
            tracing(TracingContext(self.mode)),
            functorch_config.patch(enable_autograd_cache=False),
            inductor_config.patch(_OPTIONS),
            torch.compiler.config.patch(cache_key_tag=_tag()),  # type: ignore[attr-defined]
        ):
            run = compile_fx(traced.gm, values, inner_compile=inner)
        return run, _module_of(found)

    def _used_last(self, output: Node) -> list[list[int]]:
        """Of every call: slots that no later one reads."""
        kept = {self.slots[n] for n in output.all_input_nodes if n in self.slots}
        last: dict[int, int] = {}
        for i, call in enumerate(self.division.calls):
            for node in (*call.inputs, *call.outputs):
                if node in self.slots:
                    last[self.slots[node]] = i
        return [
            [slot for slot, at in last.items() if at == i and slot not in kept]
            for i in range(len(self.division.calls))
        ]

    def _step(self, call: Any, run: Any, last_used: list[int]) -> _Step:
        arguments, inputs = [], []
        for place, node in enumerate(call.inputs):
            is_own = node.op == "get_attr"
            arguments.append(tensor_of(self.gm, node).detach() if is_own else None)
            if not is_own:
                inputs.append((place, self.slots[node]))
        return _Step(run, arguments, inputs, [self.slots[n] for n in call.outputs], last_used)


@dataclass(frozen=True)
class _Traced:
    gm: GraphModule
    results: list[Any]


class _Noting(Interpreter):
    """Runs a graph and notes each node's value."""

    def run_node(self, n: Node) -> Any:
        n.meta["val"] = result = super().run_node(n)
        return result


@functools.cache
def _tag() -> str:
    """What compiled code depends on and torch does not know: this package, and the limit of instruction sets."""
    package = Path(__file__).parents[1]
    source = files_digest(package / folder for folder in ("kernels", "lowering", "comm"))
    own = f"numadist {source} {torch.backends.cpu.get_cpu_capability()}"
    return f"{torch.compiler.config.cache_key_tag} {own}"


def _described(value: Any) -> Any:
    """All that generated code depends on."""
    if not isinstance(value, Tensor):
        return str(value)
    return str(tuple(value.shape)), str(value.stride()), value.dtype, str(value.storage_offset())


def _module_of(found: list[Any]) -> ModuleType | None:
    """The module of code generated by Inductor, of the only graph that was compiled."""
    run = getattr(found[0], "current_callable", None) if len(found) == 1 else None
    runner = getattr(run, "__self__", None)
    name = getattr(getattr(run, "__func__", None), "__globals__", {}).get("__file__")
    modules = torch._inductor.codecache.PyCodeCache.modules
    return next((m for m in modules if runner is not None and m.__file__ == name), None)
