"""Planning: from every linear layer, taken as a row-parallel sink, walk back and place what feeds it.

The walk asks the sink's input to be sharded over the contracted dim and carries that placement backwards, one rule an
op, until it reaches linear layers (they become column-parallel), parameters (they are sharded) or values that every
rank has whole anyway (they are sliced where they are used). If a cut would fall inside a head, a KV group or an
interleave, the walk starts again with the larger unit the failing reshape names: that is how heads are found
without being named. Nothing is guessed: a block is committed only if every node on the way has a rule, all
placements of a node agree, and no sharded value is used outside.
"""

import heapq
import math
import operator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import Contraction, Dependencies, as_contraction
from numadist.sharding import rules
from numadist.sharding.gathered_output import plan_gathered_outputs
from numadist.sharding.placement import (
    CannotShard,
    Cut,
    DimShard,
    NeedsUnit,
    Shard,
    base_unit,
    cut_size,
    split_units,
)
from numadist.sharding.vocabulary import RowSplit, plan_vocabulary

NO_COLUMN = "no linear layer before it can be column-parallel"
# Parameters below this share of the model are not worth a line in the warning.
MIN_SHARE_WORTH_A_WORD = 0.02
_MAX_RESTARTS = (
    8  # every restart adds one unit of the model (head, KV group, interleave): far more than any has
)


@dataclass
class BlockPlan:
    """One block: column-parallel layers, what is between, and the row-parallel sink whose output is partial."""

    sink: Contraction
    columns: list[Node]
    values: dict[Node, rules.Placement]  # sharded activations, and the parameters' own nodes
    slices: dict[
        Node, tuple[Shard, list[Node]]
    ]  # replicated value -> (what a rank needs of it, who needs it)
    params: dict[str, Shard]
    units: tuple[int, ...]


@dataclass
class LeftAlone:
    """A linear layer that stays replicated, and why."""

    node: Node
    reason: str
    blamed: Node


@dataclass
class PropagatedPlan:
    num_ranks: int
    blocks: list[BlockPlan] = field(default_factory=list)
    row_splits: list[RowSplit] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)


class _Failed(Exception):
    def __init__(self, reason: str, blamed: Node):
        super().__init__(reason)
        self.reason, self.blamed = reason, blamed

    @property
    def is_boundary(self) -> bool:
        """The walk ended where blocks end, without finding a layer to pair with: true of every first layer."""
        return self.reason in {NO_COLUMN, rules.NORM_NEEDS_WHOLE}


@dataclass
class _Reach:
    between: set[Node]
    layers: list[Node]
    output: bool


def plan(gm: GraphModule, num_ranks: int, state_inputs: frozenset[str] = frozenset()) -> PropagatedPlan:
    """Decide for `num_ranks` ranks which linear layers are column-parallel, row-parallel or replicated.

    state_inputs: inputs that live on the ranks, each of which passes in its own part.
    """
    return _Planner(gm, num_ranks, state_inputs).run()


class _Planner:
    def __init__(self, gm: GraphModule, num_ranks: int, state_inputs: frozenset[str]):
        self.num_ranks = num_ranks
        self.deps = Dependencies(gm)
        self.index = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.contractions = {c.node: c for n in gm.graph.nodes if (c := as_contraction(n, self.deps))}
        self.state_inputs = state_inputs
        self.taken: set[Node] = set()  # sinks and columns of committed blocks
        self.loads = [0] * num_ranks  # bytes of their parameters that each rank holds

    def run(self) -> PropagatedPlan:
        result = PropagatedPlan(self.num_ranks)
        failures: dict[Node, _Failed] = {}
        for node, contraction in self.contractions.items():
            if self.num_ranks == 1 or node in self.taken:
                continue
            try:
                block = self._plan_block(contraction)
            except _Failed as failed:
                failures[node] = failed
                continue
            result.blocks.append(block)
            self.taken |= {node, *block.columns}
            self._load(block)
        open_layers = [node for node in failures if node not in self.taken]
        if self.num_ranks > 1:
            heads = {n: self.contractions[n] for n in open_layers if self._reach(n).output}
            result.row_splits = plan_vocabulary(self.deps, heads, self.num_ranks)
            heads_taken = {n for split in result.row_splits for n in split.heads}
            rest = [self.contractions[n] for n in open_layers if n not in heads_taken]
            result.row_splits += plan_gathered_outputs(self.deps, rest, self.num_ranks)
        split_heads = {n for split in result.row_splits for n in split.heads}
        for node in open_layers:
            if node not in split_heads:
                cause = self._cause(node, failures, result.blocks)
                result.left_alone.append(LeftAlone(node, cause.reason, cause.blamed))
        if self.num_ranks > 1:
            result.left_alone += self._weights_outside_layers()
        return result

    def _weights_outside_layers(self) -> list[LeftAlone]:
        """Large parameters that no linear layer and no table accounts for, e.g. the experts of a mixture."""
        total = sum(p.numel() for p in {id(p): p for p in self.deps.parameters.values()}.values())
        found = []
        for node in self.deps.nodes:
            if not self.deps.is_parameter(node) or len(query.shape(node)) < 2:
                continue
            if self.deps.parameters[str(node.target)].numel() < MIN_SHARE_WORTH_A_WORD * total:
                continue
            for user in self._users_of_weight(node):
                if user not in self.contractions and user.target is not query.aten.embedding.default:
                    reason = (
                        f"parameter {node.target} is used by {query.op_name(user)}, which cannot be sharded"
                    )
                    found.append(LeftAlone(user, reason, user))
                    break
        return found

    def _users_of_weight(self, node: Node) -> list[Node]:
        """Ops that use the parameter itself, views of it looked through."""
        return [u for n in node.users for u in (self._users_of_weight(n) if self.deps.is_weight(n) else [n])]

    def _reach(self, node: Node) -> "_Reach":
        """What the layer's output flows into before the next linear layer."""
        todo, seen, layers, output = list(node.users), set(), [], False
        while todo:
            user = todo.pop()
            if user in seen:
                continue
            seen.add(user)
            output |= user.op == "output"
            if user in self.contractions:
                layers.append(user)
            else:
                todo += user.users
        return _Reach(seen - set(layers), layers, output)

    def _cause(self, node: Node, failures: dict[Node, _Failed], blocks: list[BlockPlan]) -> _Failed:
        """Why the layer is replicated: it could have been column- or row-parallel, so look at both ends."""
        own, reach = failures[node], self._reach(node)
        for layer in reach.layers:
            if layer in failures and layer not in self.taken and not failures[layer].is_boundary:
                return failures[layer]
        if any(n in reach.between for b in blocks for n in (*b.values, *b.slices)):
            return _Failed("every rank needs its whole output", node)
        if own.is_boundary and reach.output:
            return _Failed("its output is the model's output", node)
        return own

    def _plan_block(self, sink: Contraction) -> BlockPlan:
        """Walk with ever larger units until the cut falls on boundaries everywhere. Raises: _Failed."""
        if not query.is_static(sink.size):
            raise _Failed("its contracted dim is dynamic", sink.node)
        base = base_unit(sink.size, self.num_ranks)
        needed: set[int] = set()
        for _ in range(_MAX_RESTARTS):
            units = _unit_chain(sink.size, self.num_ranks, base, needed)
            cuts = self._cuts(sink, units)
            if cuts is None:
                count = sink.size // units[0]
                raise _Failed(
                    f"{count} units of {units[0]} cannot be split over {self.num_ranks} ranks; "
                    f"possible rank counts: 1 to {count}",
                    sink.node,
                )
            ctx = rules.Context(self.num_ranks, inside_ok=sink.size // units[-1] < self.num_ranks)
            try:
                return _Walk(self, sink, DimShard(cuts), ctx, units).run()
            except NeedsUnit as need:
                if need.unit in needed or sink.size % need.unit:
                    raise _Failed(f"no cut falls on multiples of {need.unit}", sink.node) from None
                needed.add(need.unit)
        raise _Failed("no unit found that all reshapes accept", sink.node)

    def _cuts(self, sink: Contraction, units: tuple[int, ...]) -> tuple[Cut, ...] | None:
        """Of the cuts that differ in who gets more, the one that leaves the fullest rank emptiest.

        Blocks wait for each other's sums, so a rank with more of the heads cannot make good for it with less of an
        MLP: that would have both kinds of blocks wait. Instead it is another rank that has more in the next layer.
        """
        weight = query.value(sink.weight)
        bytes_per_index = weight.numel() * weight.dtype.itemsize // sink.size

        def filled(cuts: tuple[Cut, ...]) -> list[int]:
            loads = zip(self.loads, cuts, strict=True)
            return sorted((load + cut_size(cut) * bytes_per_index for load, cut in loads), reverse=True)

        found = [split_units(sink.size, units, self.num_ranks, first) for first in range(self.num_ranks)]
        return min((cuts for cuts in found if cuts is not None), key=filled, default=None)

    def _load(self, block: BlockPlan) -> None:
        for name, shard in block.params.items():
            parameter = self.deps.parameters[name]
            for rank in range(self.num_ranks):
                local = math.prod(shard.local_shape(parameter.shape, rank))
                self.loads[rank] += local * parameter.dtype.itemsize


def _unit_chain(size: int, num_ranks: int, base: int, needed: set[int]) -> tuple[int, ...]:
    """Units in ascending order, each dividing the next; the base unit only where the needed ones are too few."""
    chain: list[int] = []
    for unit in sorted(needed):
        chain.append(math.lcm(unit, chain[-1] if chain else 1))
    chain = sorted(set(chain))
    if not chain or (size // chain[0] < num_ranks and chain[0] > base and chain[0] % base == 0):
        chain.insert(0, base)
    return tuple(chain)


class _Walk:
    """One attempt: the cut of the sink's contracted dim is given."""

    def __init__(
        self, planner: _Planner, sink: Contraction, cut: DimShard, ctx: rules.Context, units: tuple[int, ...]
    ):
        self.planner, self.sink, self.ctx, self.units = planner, sink, ctx, units
        self.deps, self.index = planner.deps, planner.index
        self.cut = cut
        self.values: dict[Node, rules.Placement] = {}
        self.placed_for: dict[Node, list[Node]] = {}
        self.columns: list[Node] = []
        self.slices: dict[Node, tuple[Shard, list[Node]]] = {}
        self.params: dict[str, Shard] = {}
        self.heap: list[tuple[int, Node]] = []

    def run(self) -> BlockPlan:
        last = len(query.shape(self.sink.input)) - 1
        self._place(self.sink.input, Shard({last: self.cut}), self.sink.node)
        self._place(self.sink.weight, Shard({self.sink.weight_k_dim: self.cut}), self.sink.node)
        while self.heap:
            self._visit(heapq.heappop(self.heap)[1])
        if not self.columns:
            raise _Failed(NO_COLUMN, self.sink.node)
        self._check_params()
        return BlockPlan(self.sink, self.columns, self.values, self.slices, self.params, self.units)

    def _place(self, node: Node, placement: rules.Placement, reader: Node) -> None:
        if node.target is operator.getitem and isinstance(placement, Shard):
            self._place_piece(
                node, query.operand(node, 0), query.integer(node, 1, "index"), placement, reader
            )
            return
        if not self._agrees(node, placement):
            self.values[node] = placement
            heapq.heappush(self.heap, (-self.index[node], node))
        self.placed_for.setdefault(node, []).append(reader)

    def _agrees(self, node: Node, placement: rules.Placement) -> bool:
        """Whether the node was placed so before. Raises: _Failed if it was placed in another way."""
        known = self.values.get(node)
        if known is not None and known != placement:
            what = f"parameter {node.target}" if self.deps.is_parameter(node) else "this value"
            raise _Failed(f"two users want different parts of {what}", node)
        return known is not None

    def _place_piece(self, item: Node, source: Node, i: int, placement: Shard, reader: Node) -> None:
        """One output of an op that returns a list: collect the placements of all of them in one dict."""
        self._agrees(item, placement)
        self.values[item] = placement
        self.placed_for.setdefault(item, []).append(reader)
        pieces = self.values.get(source)
        if pieces is None:
            pieces = self.values[source] = {}
            heapq.heappush(self.heap, (-self.index[source], source))
        assert isinstance(pieces, dict)
        pieces[i] = placement
        self.placed_for.setdefault(source, []).append(item)

    def _used_elsewhere(self, node: Node) -> list[Node]:
        items = [node] if not isinstance(self.values[node], dict) else [*self.placed_for[node], node]
        asked = {a for n in items for a in self.placed_for.get(n, [])}
        return [u for n in items for u in n.users if u not in asked and not query.is_shape_query(u)]

    def _visit(self, node: Node) -> None:
        placement = self.values[node]
        if self.deps.is_parameter(node):
            assert isinstance(placement, Shard)
            self.params[str(node.target)] = placement
            return
        if node.target in self.planner.state_inputs and not self._used_elsewhere(node):
            return  # lives on the ranks: each passes in its own part
        if node.op != "call_function" or self._used_elsewhere(node) or node in self.planner.taken:
            self._slice(node, placement)
            return
        contraction = self.planner.contractions.get(node)
        try:
            inputs = (
                self._column(contraction, placement)
                if contraction
                else self._rule_of(node)(node, placement, self.ctx)
            )
        except CannotShard as reason:
            if not self.deps.is_pure(node):
                raise _Failed(str(reason), node) from None
            self._slice(node, placement)
            return
        for source, part in inputs.items():
            self._place(source, part, node)

    def _rule_of(self, node: Node) -> rules.Rule:
        found = rules.find_rule(node)
        if found is None:
            raise CannotShard(f"numadist has no sharding rule for {query.op_name(node)}")
        return found

    def _column(self, layer: Contraction, placement: rules.Placement) -> rules.InputPlacements:
        last = len(query.shape(layer.node)) - 1
        if not isinstance(placement, Shard) or set(placement.dims) != {last}:
            raise CannotShard("a linear layer can be column-parallel over its output features only")
        if layer.bias is not None and not self.deps.is_weight(layer.bias):
            raise CannotShard("its bias is computed, not a parameter")
        self.columns.append(layer.node)
        inputs: rules.InputPlacements = {layer.weight: Shard({layer.weight_n_dim: placement.dims[last]})}
        if layer.bias is not None:
            inputs[layer.bias] = Shard({0: placement.dims[last]})
        return inputs

    def _slice(self, node: Node, placement: rules.Placement) -> None:
        """Every rank has `node` whole: each takes its part where it is read."""
        if isinstance(placement, dict):
            raise _Failed("one output of several is used whole and in part", node)
        self.slices[node] = (placement, list(dict.fromkeys(self.placed_for[node])))
        del self.values[node]

    def _check_params(self) -> None:
        """A parameter of the block must belong to it alone, and a sink's bias is kept by one rank."""
        bias = self.sink.bias
        if bias is not None and not self.deps.is_parameter(bias):
            raise _Failed("the bias of the row-parallel layer is computed, not a parameter", bias)
        # In an order of the graph: which node is blamed is part of the plan, and ranks must plan alike.
        inside = sorted((n for n in self.values if self.deps.is_parameter(n)), key=self.index.__getitem__)
        inside += [bias] if bias is not None and bias not in inside else []
        for node in inside:
            outside = [n for n in self.deps.same_parameter(node) if n not in inside]
            users = [u for u in node.users if u not in self.values and u is not self.sink.node]
            if outside or users:
                raise _Failed(f"parameter {node.target} is also used outside the block", node)
        if not all(torch.is_floating_point(self.deps.parameters[str(n.target)]) for n in inside):
            raise _Failed("a parameter is not floating point (quantised?)", self.sink.node)
