"""Repeated parts of a graph, found by structure: a model's layers, whatever its modules are called.

A graph becomes calls, in order, of few parts. Calls whose nodes do the same in the same connections, on weights of the
same shapes, are calls of one part, with their weights and all else they read as inputs. What does not repeat is a
part of its own.

Where to cut: nodes of one label (what they do, and the shapes of their weights) that occur once a layer mark the
layers; all marks are moved alike to where the fewest values cross. What depends on no weight (masks, rotary tables)
belongs to no layer, unless one alone uses it. Candidates are compared by how many nodes are left to compile.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from numadist.graph.query import aten

# Positions of marks that are tried in full; the others are worse by their labels alone.
_CANDIDATES = 4
# What is left to compile of a graph, at most; else it stays whole.
_WORTH_IT = 0.8
_SIZES = {aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int}
_NEVER = 1 << 30


@dataclass(frozen=True)
class Call:
    """part: index of what is called. inputs, outputs: nodes of the whole graph, in the part's order."""

    part: int
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True)
class Division:
    """numbers: nodes that compute sizes of the graph's inputs, in order; calls take what they give as inputs.

    parts: graphs without tensors of their own, each returns a list; text[i]: all that parts[i] is, as text.
    """

    numbers: list[Node]
    parts: list[GraphModule]
    text: list[str]
    calls: list[Call]


def divide(gm: GraphModule) -> Division:
    """The graph as calls of its parts; as one call if nothing in it repeats.

    torch.export's checks of inputs are left out.
    Raises: ValueError for a graph with other calls than of functions, or with graphs inside.
    """
    nodes = list(gm.graph.nodes)
    for node in nodes:
        inner = node.op == "get_attr" and not isinstance(tensor_of(gm, node), Tensor)
        if node.target == "_guards_fn":  # checks of the inputs, which are the caller's
            continue
        if inner or node.op not in {"placeholder", "get_attr", "call_function", "output"}:
            raise ValueError(f"{node.op} {node.target}")
    trunk = _Trunk(gm, nodes)
    found = [_segments(trunk, cuts, first) for cuts in trunk.candidates() for first in (False, True)]
    total = sum(node.op == "call_function" for node in nodes)
    found = [segments for segments in found if _cost(segments).compiled <= _WORTH_IT * total]
    best = _by_preference(found, _cost)[0] if found else _segments(trunk, [])
    return _division(trunk.numbers, _merged(trunk, best))


@dataclass(frozen=True)
class _Cost:
    """compiled: nodes of all different segments. largest: of one. calls and crossing: what is paid at every run."""

    compiled: int
    largest: int
    calls: int
    crossing: int


def _by_preference(candidates: list[Any], cost: Callable[[Any], _Cost]) -> list[Any]:
    """Fewest calls first, of those that compile little: cuts inside a layer may share a norm, but cost calls.

    Units of many layers are no choice: they compile most of themselves for nothing.
    """
    costs = [cost(c) for c in candidates]
    least = min((c.compiled for c in costs), default=0)
    good = [i for i, c in enumerate(costs) if c.compiled <= least + 0.6 * c.largest]
    fewest = min((costs[i].calls for i in good), default=0) + 1  # one more, and the last layer stands alone
    good.sort(key=lambda i: (max(costs[i].calls, fewest), costs[i].compiled, costs[i].crossing))
    return [candidates[i] for i in good]


def tensor_of(gm: GraphModule, node: Node) -> Any:
    """What a get_attr node reads."""
    return operator.attrgetter(str(node.target))(gm)


class _Trunk:
    """The nodes that layers are made of, in order: those that depend on weights or write into tensors."""

    def __init__(self, gm: GraphModule, nodes: list[Node]):
        self.gm, self.nodes = gm, nodes
        self.output = nodes[-1]
        pure = _pure(gm, nodes)
        # Numbers that the inputs' sizes decide are computed by whoever calls; others where they are used.
        sizes = [n for n in nodes if n.op == "call_function" and _is_size(n)]
        self.numbers: list[Node] = []
        for n in sizes:
            if all(s.op == "placeholder" or s in self.numbers for s in n.all_input_nodes):
                self.numbers.append(n)
        self.sizes = set(sizes) - set(self.numbers)
        ops = [n for n in nodes if n.op == "call_function" and n not in set(sizes)]
        self.pure = [n for n in ops if n in pure]
        self.seq = [n for n in ops if n not in pure]
        self.place = {n: i for i, n in enumerate(self.seq)}
        self.labels = [self._label(n) for n in self.seq]
        self.widths = self._widths()

    def weight(self, node: Node) -> str:
        """A tensor of the graph's own, as far as code depends on it."""
        t = tensor_of(self.gm, node)
        return f"{list(t.shape)} {t.dtype} {'packed' if t.is_mkldnn else list(t.stride())}"

    def _label(self, node: Node) -> str:
        def shown(arg: Node) -> str:
            return self.weight(arg) if arg.op == "get_attr" else "."

        return f"{node.target} {_shown(node.args, shown)} {_shown(node.kwargs, shown)}"

    def _widths(self) -> list[int]:
        """Of a cut before each node: how many values cross it; _NEVER where one is no tensor."""
        change = [0] * (len(self.seq) + 1)
        for i, node in enumerate(self.seq):
            last = max((self.place.get(user, len(self.seq)) for user in _users(node, self.sizes)), default=i)
            if node.target is not operator.getitem and any(u.target is operator.getitem for u in node.users):
                items = [self.place[u] for u in node.users]
                change[i + 1] += _NEVER
                change[max(items) + 1 if max(items) < len(self.seq) else -1] -= _NEVER
            elif last > i:
                change[i + 1] += 1
                if last < len(self.seq):
                    change[last + 1] -= 1
        widths, width = [], 0
        for step in change[:-1]:
            width += step
            widths.append(width)
        return widths

    def candidates(self) -> list[list[int]]:
        """Where to cut, the most promising first."""
        places: dict[str, list[int]] = {}
        for i, label in enumerate(self.labels):
            places.setdefault(label, []).append(i)
        tried: dict[tuple[int, ...], list[list[int]]] = {}
        for found in places.values():
            gaps = tuple(b - a for a, b in itertools.pairwise(found))
            if gaps and gaps not in tried:
                tried[gaps] = self._moved(found)
        every = [cuts for moved in tried.values() for cuts in moved if self._leaves_lists_whole(cuts)]
        return _by_preference(every, self.cost)[:_CANDIDATES]

    def _moved(self, marks: list[int]) -> list[list[int]]:
        """The marks, moved alike over equal labels to wherever the fewest values cross."""
        gap = min(b - a for a, b in itertools.pairwise(marks))
        shifts = [0, *self._equal(marks, gap, -1), *self._equal(marks, gap, 1)]
        width = {shift: sum(self.widths[m + shift] for m in marks) for shift in shifts}
        return [
            self._with_end([m + shift for m in marks])
            for shift in shifts
            if width[shift] == min(width.values())
        ]

    def _leaves_lists_whole(self, cuts: list[int]) -> bool:
        """Whether only tensors cross the cuts: a list of them cannot be handed on."""
        return all(self.widths[cut] < _NEVER for cut in cuts if cut < len(self.seq))

    def _with_end(self, cuts: list[int]) -> list[int]:
        """The cuts, and one behind the last layer if it has the labels of another one."""
        for length, first in sorted({(b - a, a) for a, b in itertools.pairwise(cuts)}):
            end = cuts[-1] + length
            if end < len(self.seq) and self.labels[first : first + length] == self.labels[cuts[-1] : end]:
                return [*cuts, end]
        return cuts

    def _equal(self, marks: list[int], gap: int, step: int) -> Iterable[int]:
        """Shifts in one direction across which all marks have the same labels."""
        for distance in range(1, gap):
            shift = step * distance
            if marks[0] + shift < 0 or marks[-1] + shift >= len(self.seq):
                return
            if len({self.labels[m + (shift if step < 0 else shift - 1)] for m in marks}) > 1:
                return
            yield shift

    def cost(self, cuts: list[int]) -> _Cost:
        """By labels alone, without connections."""
        bounds = [0, *cuts, len(self.seq)]
        kinds = {tuple(self.labels[a:b]) for a, b in itertools.pairwise(bounds)}
        sizes = [len(kind) for kind in kinds]
        return _Cost(sum(sizes), max(sizes), len(cuts), sum(self.widths[c] for c in cuts))


@dataclass
class _Segment:
    """A stretch of the trunk with what it alone uses, and the values it reads and gives."""

    nodes: list[Node]
    inputs: dict[Any, Node] = field(default_factory=dict)
    outputs: list[Node] = field(default_factory=list)
    text: str = ""


def _segments(trunk: _Trunk, cuts: Sequence[int], pure_first: bool = False) -> list[_Segment]:
    """The trunk cut before these places; nothing is left empty.

    pure_first: whatever depends on no weight comes before all layers; else only what several use does.
    """
    bounds = [0, *cuts, len(trunk.seq)]
    stretches = [trunk.seq[a:b] for a, b in itertools.pairwise(bounds) if a < b]
    if cuts:
        stretches.insert(0, [])  # of values that several read
    home: dict[Node, int] = {n: i for i, stretch in enumerate(stretches) for n in stretch}
    for node in reversed(trunk.pure):
        homes = {home.get(user, 0) for user in _users(node, trunk.sizes)}
        home[node] = homes.pop() if len(homes) == 1 and not pure_first else 0
    shared = [n for n in trunk.pure if home[n] == 0]
    segments = [
        _read(trunk, [*shared, *stretch] if i == 0 else stretch, home, i)
        for i, stretch in enumerate(stretches)
    ]
    segments = [s for s in segments if s.nodes]
    _settle(trunk, segments)
    return segments


def _read(trunk: _Trunk, stretch: list[Node], home: dict[Node, int], index: int) -> _Segment:
    """Nodes of a segment, each behind what only it needs; and what comes from outside."""
    segment = _Segment([])
    done: set[Node] = set()

    def need(node: Node) -> None:
        if node in done:
            return
        done.add(node)
        if node.op == "call_function" and (node in trunk.sizes or home.get(node) == index):
            for source in node.all_input_nodes:
                need(source)
            segment.nodes.append(node)
        else:
            segment.inputs.setdefault(_identity(node), node)

    for node in stretch:
        need(node)
    return segment


def _settle(trunk: _Trunk, segments: list[_Segment]) -> None:
    """Who gives what, and the text of each."""
    wanted = {node for segment in segments for node in segment.inputs.values()}
    wanted |= set(trunk.output.all_input_nodes)
    for segment in segments:
        segment.outputs = [n for n in segment.nodes if n in wanted and n not in trunk.sizes]
        segment.text = _text(trunk, segment)


def _text(trunk: _Trunk, segment: _Segment) -> str:
    names = {identity: f"in{i}" for i, identity in enumerate(segment.inputs)}
    lines = [
        f"in{i} {trunk.weight(node) if node.op == 'get_attr' else ''}"
        for i, node in enumerate(segment.inputs.values())
    ]
    for node in segment.nodes:
        args = [_shown(a, lambda n: names[_identity(n)]) for a in (node.args, node.kwargs)]
        names[node] = f"v{len(names)}"
        lines.append(f"{names[node]} = {node.target} {' '.join(args)}")
    lines.append(" ".join(names[node] for node in segment.outputs))
    return "\n".join(lines)


def _merged(trunk: _Trunk, segments: list[_Segment]) -> list[_Segment]:
    """Neighbours that do not repeat become one."""
    count = Counter(s.text for s in segments)
    groups: list[list[_Segment]] = []
    for segment in segments:
        if groups and count[segment.text] == 1 and count[groups[-1][-1].text] == 1:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    merged = []
    for group in groups:
        joined = _Segment(list(dict.fromkeys(n for s in group for n in s.nodes)))
        inside = set(joined.nodes)
        for segment in group:
            joined.inputs |= {k: n for k, n in segment.inputs.items() if n not in inside}
        merged.append(joined)
    _settle(trunk, merged)
    return merged


def _cost(segments: list[_Segment]) -> _Cost:
    sizes = {s.text: len(s.nodes) for s in segments}.values()
    return _Cost(sum(sizes), max(sizes), len(segments), sum(len(s.inputs) for s in segments))


def _division(numbers: list[Node], segments: list[_Segment]) -> Division:
    parts: list[GraphModule] = []
    index: dict[str, int] = {}
    calls = []
    for segment in segments:
        if segment.text not in index:
            index[segment.text] = len(parts)
            parts.append(_part(segment))
        calls.append(Call(index[segment.text], tuple(segment.inputs.values()), tuple(segment.outputs)))
    return Division(numbers, parts, list(index), calls)


def _part(segment: _Segment) -> GraphModule:
    graph = Graph()
    made: dict[Any, Node] = {}
    for i, (key, _) in enumerate(segment.inputs.items()):
        made[key] = graph.placeholder(f"in{i}")
    for node in segment.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: made[_identity(n)])
        made[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    graph.output([made[node] for node in segment.outputs])
    return GraphModule(torch.nn.Module(), graph)


def _identity(node: Node) -> Any:
    """Nodes that read the same tensor of the graph's own are one value."""
    return node.target if node.op == "get_attr" else node


def _users(node: Node, sizes: set[Node]) -> set[Node]:
    """Who reads the node, also through sizes."""
    found: set[Node] = set()
    for user in node.users:
        found |= _users(user, sizes) if user in sizes else {user}
    return found


def _is_size(node: Node) -> bool:
    """A size, or a number computed of sizes."""
    if node.target in _SIZES:
        return True
    module = getattr(node.target, "__module__", "")
    return module == "_operator" and node.target is not operator.getitem


def _pure(gm: GraphModule, nodes: list[Node]) -> set[Node]:
    """Nodes that depend on no weight and whose place does not matter: nothing they read is written to."""
    weighted: set[Node] = set()
    for node in nodes:
        if node.op == "get_attr":
            if _is_weight(gm, node):
                weighted.add(node)
        elif node.target not in _SIZES and any(source in weighted for source in node.all_input_nodes):
            weighted.add(node)
    written = [arg for n in nodes if _writes(n) for arg in _written(n)]
    behind: set[Node] = set()
    while written:
        node = written.pop()
        if node not in behind and node not in weighted:
            behind.add(node)
            written += node.all_input_nodes
    for node in nodes:
        if node.op == "call_function" and node.target not in _SIZES:
            placed = node in behind or _writes(node)
            if placed or any(s in behind or s in weighted for s in node.all_input_nodes):
                weighted.add(node)
    return {n for n in nodes if n not in weighted}


def _is_weight(gm: GraphModule, node: Node) -> bool:
    t = tensor_of(gm, node)
    return isinstance(t, torch.nn.Parameter) or t.is_mkldnn or str(node.target).startswith("packed_")


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _written(node: Node) -> list[Node]:
    """The arguments that the node writes into."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    place = {a.name: i for i, a in enumerate(arguments)}
    found = [
        node.kwargs.get(name) if name in node.kwargs else node.args[place[name]]
        for name in names
        if name in node.kwargs or place[name] < len(node.args)
    ]
    return [arg for arg in found if isinstance(arg, Node)]


def _shown(arg: Any, name: Any) -> str:
    """An argument as text, nodes by `name`."""
    if isinstance(arg, Node):
        return str(name(arg))
    if isinstance(arg, list | tuple):
        return f"({' '.join(_shown(a, name) for a in arg)})"
    if isinstance(arg, dict):
        return " ".join(f"{k}={_shown(v, name)}" for k, v in arg.items())
    if isinstance(arg, slice):
        return f"slice{_shown((arg.start, arg.stop, arg.step), name)}"
    return repr(arg)
