"""A graph compiled part by part, each once: a model's layer is compiled once, however many layers there are.

Parts (numadist/graph/repeats.py) take weights and all else they read as inputs, so their code is kept for other starts
and ranks (numadist/lowering/kept_code.py). Between parts there is a loop in Python, which recorded steps hide.
Inductor is imported when it is first used: that takes seconds, which a start without it does not need.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

from numadist.graph.repeats import Division, tensor_of
from numadist.log import get_logger
from numadist.lowering.kept_code import CodeStore, DivisionCode, PartCode, is_plain, loaded, own_tag
from numadist.lowering.one_compiler import shared_out
from numadist.lowering.packed_ops import write_packed_linears

log = get_logger(__name__)

# Checks of every intermediate tensor, in Python: hundreds a step, as long as a small layer.
_OPTIONS: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False, "freezing": False}
# Dynamo and Inductor have global settings; ranks may be threads.
_lock = threading.RLock()

# Of one input: names of the dims whose sizes change between calls.
Dims = Mapping[int, str]


# Takes the list of its inputs, which it empties, and returns its outputs.
Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class _Step:
    """One call of a part. inputs: places among its arguments and the slots that go there; the others are weights."""

    run: Run
    arguments: list[Any]
    inputs: list[tuple[int, int]]
    sizes: Sequence[Sequence[int]]  # arguments and their dims, whose sizes are the last arguments
    outputs: list[int]
    last_used: list[int]  # slots that nobody reads any more


@dataclass(frozen=True)
class _Code:
    """A part's. module: what Inductor generated, if that is all that runs. sizes: see _Step. guards: see PartCode."""

    run: Run
    module: ModuleType | None
    sizes: Sequence[Sequence[int]]
    guards: str


class Program:
    """Called with the graph's inputs as a flat list; returns its outputs as one. Inputs are read, never kept."""

    def __init__(self, num_slots: int, numbers: list[Any], steps: list[_Step], outputs: list[Any]):
        """numbers: (slot, function, arguments) each, where a Slot stands for what is in it."""
        self._num_slots, self._numbers, self._steps, self._outputs = num_slots, numbers, steps, outputs
        self.modules: list[ModuleType | None] = []  # generated code that runs, one entry a call
        self.num_compiled = 0  # different parts
        self._guards: frozenset[str] = frozenset()
        self._seen: dict[tuple[int, ...], bool] = {}

    def holds_for(self, sizes: Sequence[int]) -> bool:
        """Whether the code is right for these sizes, of the names it was compiled with, in their order."""
        key = tuple(sizes)
        if (known := self._seen.get(key)) is None:
            env = ShapeEnv()
            known = all(env.evaluate_guards_expression(text, list(key)) for text in self._guards)
            self._seen[key] = known
        return known

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        slots = [*inputs, *[None] * (self._num_slots - len(inputs))]
        for slot, function, arguments in self._numbers:
            slots[slot] = function(*[slots[a.slot] if isinstance(a, _Slot) else a for a in arguments])
        for step in self._steps:
            arguments = step.arguments.copy()
            for place, slot in step.inputs:
                arguments[place] = slots[slot]
            arguments += [arguments[place].shape[dim] for place, dim in step.sizes]
            for slot, value in zip(step.outputs, step.run(arguments), strict=True):
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
    import torch._inductor.config as inductor_config

    with _lock, torch.no_grad(), inductor_config.patch(_OPTIONS):
        store, layout = CodeStore(), _Layout(gm, division)
        name = store.name("division", _words(gm, division, inputs, dims, hints))
        with inductor_config.patch({"cpp.vec_isa_ok": True} if store.knows_isas() else {}):
            found = _kept(store, name)
            if found is None:
                compiler = _Compiler(gm, division, hints, store)
                found = compiler.code(inputs, dims)
                if compiler.names:
                    store.keep(name, DivisionCode(compiler.names, found[1]))
        return layout.program(*found)


def _kept(store: CodeStore, name: str) -> tuple[list[_Code], list[int]] | None:
    """Code of every part, and of every call its part; None if any of it is not there."""
    division = store.division(name)
    parts = [store.part(part) for part in division.parts] if division is not None else [None]
    if division is None or not all(parts):
        return None
    try:
        return [_ready(part) for part in parts if part is not None], division.runs
    except Exception as reason:  # whatever the compiler, or code of another torch, raises
        log.debug("%s is ignored: %s: %s", name, type(reason).__name__, reason)
        return None


def _ready(part: PartCode) -> _Code:
    module = loaded(part.source)
    return _Code(module.call, module, part.sizes, part.guards)


def _words(
    gm: GraphModule,
    division: Division,
    inputs: Sequence[Any],
    dims: Sequence[Dims],
    hints: Mapping[str, int],
) -> str:
    """All that decides a division's code."""
    places: dict[Node, str] = {}

    def shown(value: Any) -> str:
        if not isinstance(value, Node):
            return repr(value)
        if value not in places and value.op == "get_attr":
            t = tensor_of(gm, value)
            return f"{_described(t) if not t.is_mkldnn else (tuple(t.shape), t.dtype, 'packed')}"
        return places[value]

    lines = [f"{dict(hints)}", *division.text]
    placeholders = (n for n in gm.graph.nodes if n.op == "placeholder")
    for node, value, names in zip(placeholders, inputs, dims, strict=True):
        places[node] = f"input {len(places)}"
        lines.append(_layout_of(value, names) if isinstance(value, Tensor) else repr(value))
    for node in division.numbers:
        lines.append(f"{node.target} {' '.join(map(shown, node.args))}")
        places[node] = f"number {len(places)}"
    for call in division.calls:
        lines.append(f"{call.part} {' '.join(map(shown, call.inputs))}")
        places.update({node: f"{len(lines)}.{i}" for i, node in enumerate(call.outputs)})
    return "\n".join(lines)


class _Layout:
    """Where values of a division are while it runs, whatever code runs."""

    def __init__(self, gm: GraphModule, division: Division):
        self.gm, self.division = gm, division
        self.slots: dict[Node, int] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._slot(node)
        self.numbers = [
            (self._slot(node), node.target, [self._at(a) for a in node.args]) for node in division.numbers
        ]
        for call in division.calls:
            for node in call.outputs:
                self._slot(node)

    def program(self, codes: list[_Code], runs: list[int]) -> Program:
        output = next(iter(reversed(self.gm.graph.nodes)))
        outputs = [self._at(o) for o in torch.utils._pytree.tree_leaves(output.args[0])]
        used_last = self._used_last(output)
        steps = [
            self._step(call, codes[run], used_last[i])
            for i, (call, run) in enumerate(zip(self.division.calls, runs, strict=True))
        ]
        program = Program(len(self.slots), self.numbers, steps, outputs)
        program.modules = [codes[run].module for run in runs]
        program.num_compiled = len(codes)
        program._guards = frozenset(code.guards for code in codes) - {""}
        return program

    def _slot(self, node: Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def _at(self, value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        return tensor_of(self.gm, value) if value.op == "get_attr" else _Slot(self._slot(value))

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

    def _step(self, call: Any, code: _Code, last_used: list[int]) -> _Step:
        arguments, inputs = [], []
        for place, node in enumerate(call.inputs):
            is_own = node.op == "get_attr"
            arguments.append(tensor_of(self.gm, node).detach() if is_own else None)
            if not is_own:
                inputs.append((place, self.slots[node]))
        outputs = [self.slots[n] for n in call.outputs]
        return _Step(code.run, arguments, inputs, code.sizes, outputs, last_used)


class _Compiler:
    """names: of the parts' entries, where all of them are kept."""

    def __init__(self, gm: GraphModule, division: Division, hints: Mapping[str, int], store: CodeStore):
        self.gm, self.division, self.hints, self.store = gm, division, hints, store
        self.env = ShapeEnv(duck_shape=False)  # equal sizes are no law
        self.mode = FakeTensorMode(shape_env=self.env)
        self.sizes = self._symbols(hints)
        self.fakes: dict[Any, Any] = {}  # of nodes; of tensors of the graph's own by id
        self.traced: dict[Any, _Traced] = {}
        self.names: list[str] = []

    def _symbols(self, hints: Mapping[str, int]) -> dict[str, Any]:
        if not hints:
            return {}
        from torch._dynamo.source import ConstantSource

        carrier = torch.empty(tuple(hints.values()), device="meta")
        context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(hints))
        fake = self.mode.from_tensor(carrier, symbolic_context=context, source=ConstantSource("sizes"))
        return dict(zip(hints, fake.shape, strict=True))

    def code(self, inputs: Sequence[Tensor], dims: Sequence[Dims]) -> tuple[list[_Code], list[int]]:
        """Of every part, and of every call its part."""
        placeholders = (n for n in self.gm.graph.nodes if n.op == "placeholder")
        for node, value, names in zip(placeholders, inputs, dims, strict=True):
            self.fakes[node] = self._fake_input(value, names) if isinstance(value, Tensor) else value
        for node in self.division.numbers:
            args = map_arg(node.args, lambda n: self.fakes[n])
            self.fakes[node] = node.target(*args)  # type: ignore[operator]
        kinds = [self._kind(call) for call in self.division.calls]
        symbols = f"{self.hints} {self.sizes}"
        wanted = {
            kind: self.store.name("part", self.division.text[kind[0]], str(kind[1]), symbols)
            for kind in kinds
        }
        ready = shared_out(wanted, lambda kind: self._part(kind, wanted[kind]))
        order = list(ready)
        if all(self.store.part(wanted[kind]) for kind in order):
            self.names = [wanted[kind] for kind in order]
        return [ready[kind] for kind in order], [order.index(kind) for kind in kinds]

    def _guards(self) -> str:
        """What compilation took for granted of the named sizes, as an expression of them; empty: nothing."""
        symbols = list(self.sizes.values())
        text = self.env.produce_guards_expression(symbols) if symbols else None
        if text:
            log.debug("compiled for sizes %s where %s", list(self.sizes), text)
        return text or ""

    def _fake_input(self, t: Tensor, names: Dims) -> Tensor:
        shape: list[Any] = [self.sizes[names[d]] if d in names else n for d, n in enumerate(t.shape)]
        with self.mode:
            if t.is_contiguous():
                return torch.empty(shape, dtype=t.dtype)
            return torch.empty_strided(shape, t.stride(), dtype=t.dtype)

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
        if kind not in self.traced:
            self.traced[kind] = self._traced(self.division.parts[call.part], values)
        part = self.traced[kind]
        for node, value in zip(call.outputs, part.results, strict=True):
            self.fakes[node] = value
        return kind

    def _traced(self, part: GraphModule, values: list[Any]) -> "_Traced":
        """A copy of the part that knows what its nodes are, and takes symbols of sizes as inputs too."""
        copy = GraphModule(torch.nn.Module(), torch.fx.Graph())
        copy.graph.output(copy.graph.graph_copy(part.graph, {}))
        sizes = _unbound_sizes(values)
        with copy.graph.inserting_before(next(n for n in copy.graph.nodes if n.op != "placeholder")):
            for place, dim in sizes:
                copy.graph.placeholder(f"size_of_{place}_{dim}")
        values = [*values, *[values[place].shape[dim] for place, dim in sizes]]
        with self.mode:
            results = _Noting(copy).run(*values)
        write_packed_linears(copy)
        return _Traced(copy, values, sizes, results)

    def _part(self, kind: Any, name: str) -> _Code:
        """Another process's code, or our own, which is kept."""
        kept = self.store.part(name)
        if kept is not None:
            try:
                return _ready(kept)
            except Exception as reason:
                log.debug("%s is ignored: %s: %s", name, type(reason).__name__, reason)
        code, is_plain = self._compile(kind)
        if is_plain and code.module is not None and code.module.__file__:
            self.store.keep(name, PartCode(Path(code.module.__file__).read_text(), code.sizes, code.guards))
        return code

    def _compile(self, kind: Any) -> tuple[_Code, bool]:
        """The part's code, and whether it is all in its module."""
        import torch._functorch.config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        traced = self.traced[kind]
        found: list[tuple[Any, int, int]] = []

        def inner(gm: GraphModule, example_inputs: Any, **options: Any) -> Any:
            outputs = next(iter(reversed(gm.graph.nodes))).args[0]
            sizes = len(example_inputs), len(outputs)
            found.append((compile_fx_inner(gm, example_inputs, **options), *sizes))
            return found[-1][0]

        context = TracingContext(self.mode)
        compiler_config: Any = torch.compiler.config
        tag = f"{compiler_config.cache_key_tag} {own_tag()}"
        with (
            tracing(context),
            functorch_config.patch(enable_autograd_cache=False),
            compiler_config.patch(cache_key_tag=tag),
        ):
            run: Any = compile_fx(traced.gm, traced.values, inner_compile=inner)
        module: Any = _module_of([compiled for compiled, _, _ in found])
        if module is not None and is_plain(found, context, len(traced.values), len(traced.results)):
            return _Code(module.call, module, traced.sizes, self._guards()), True
        return _Code(lambda inputs: run(*inputs), module, traced.sizes, self._guards()), False


@dataclass(frozen=True)
class _Traced:
    gm: GraphModule
    values: list[Any]
    sizes: list[tuple[int, int]]
    results: list[Any]


def _unbound_sizes(values: Sequence[Any]) -> list[tuple[int, int]]:
    """Where the symbols stand that are no input of their own: inputs and their dims.

    Inductor of torch 2.14 and later defines a symbol by an input that is it, as Dynamo writes its graphs, alone.
    """
    found: dict[str, tuple[int, int] | None] = {str(v): None for v in values if isinstance(v, torch.SymInt)}
    for place, value in enumerate(values):
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(str(size), (place, dim))
    return [where for where in found.values() if where is not None]


class _Noting(Interpreter):
    """Runs a graph and notes each node's value."""

    def run_node(self, n: Node) -> Any:
        n.meta["val"] = result = super().run_node(n)
        return result


def _layout_of(t: Tensor, names: Dims) -> str:
    """What code depends on of an input, whatever the sizes of its named dims are."""
    shape = [names.get(d, n) for d, n in enumerate(t.shape)]
    return f"{shape} {None if t.is_contiguous() else t.stride()} {t.dtype}"


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
