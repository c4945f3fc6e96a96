"""Count the work of a captured graph under a schema, for the cost model."""

import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.costmodel.op_work import OpWork, Reduction, Work
from numadist.graph import query, sdpa
from numadist.graph.query import Contraction, Dependencies, aten
from numadist.kernels import attention as kernel
from numadist.sharding.placement import Shard
from numadist.sharding.reductions import point_of, reduce_points
from numadist.sharding.schema import Block, Schema

_FREE = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.numpy_T.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
    aten.contiguous.default,
    operator.getitem,
}

Size = Callable[[Any], int]  # a size of the graph, perhaps symbolic -> the number to count with


def work_of(gm: GraphModule, schema: Schema, size: Size = query.hint) -> Work:
    """Work of one forward of `gm`, before it is rewritten for a rank. size: default the example's sizes."""
    return _Counter(gm, schema, size).work()


class _Counter:
    def __init__(self, gm: GraphModule, schema: Schema, size: Size):
        self.gm, self.schema, self.size = gm, schema, size
        self.deps = Dependencies(gm)
        self.nodes = {n.name: n for n in gm.graph.nodes}
        self.blocks = {name: i for i, block in enumerate(schema.blocks) for name in _members(block)}

    def work(self) -> Work:
        dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in self.deps.parameters.values())
        return Work(
            self.schema.num_ranks,
            dtypes.most_common(1)[0][0] if dtypes else "float32",
            tuple(op for n in self.deps.nodes if (op := self._op(n)) is not None),
            tuple(self._reductions()),
            len(self.schema.blocks),
        )

    def _op(self, node: Node) -> OpWork | None:
        if node.op != "call_function" or not isinstance(query.value(node), torch.Tensor):
            return None
        if node.target in _FREE or query.is_shape_query(node) or self.deps.is_pure(node):
            return None
        block = self.blocks.get(node.name)
        contraction = query.as_contraction(node, self.deps)
        if contraction is not None:
            return self._linear(contraction, block)
        share = self._share(node, block)
        if node.target is aten.scaled_dot_product_attention.default:
            return self._attention(node, block, share)
        if _is_fused(node):
            return None
        moved = self._bytes(node) + sum(self._bytes(n) for n in _sources(node))
        return OpWork(node.name, "other", block, share, activation_bytes=moved)

    def _linear(self, layer: Contraction, block: int | None) -> OpWork:
        rows = self._numel(layer.input) // layer.size
        outputs = self._numel(layer.node) // rows
        share = 1.0
        if block is not None:
            shards = self.schema.blocks[block].params
            share = max(
                self._shard_share(shards[str(n.target)], n)
                for n in _parameters(layer.weight)
                if n.target in shards
            )
        return OpWork(
            layer.node.name,
            "linear",
            block,
            share,
            rows,
            2.0 * rows * outputs * layer.size,
            # A row reads the matrix of its expert alone.
            self._weight_bytes(layer.weight) * min(1.0, rows / layer.num_experts),
            self._bytes(layer.input) + self._bytes(layer.node),
        )

    def _attention(self, node: Node, block: int | None, share: float) -> OpWork:
        q, k, v = (query.operand(node, i) for i in range(3))
        rows = self._numel(q) // self.size(query.shape(q)[-1])  # batch * heads * queries
        scores = float(rows * self.size(query.shape(k)[-2]))
        depth = self.size(query.shape(q)[-1]) + self.size(query.shape(v)[-1])
        moved = sum(self._bytes(n) for n in (q, k, v, node))
        form = sdpa.form(node)
        fits = form is not None and kernel.takes(form.head_dim, form.dtype, form.mask_dtype)
        return OpWork(
            node.name,
            "attention",
            block,
            share,
            rows,
            flops=2 * scores * depth,
            activation_bytes=moved,
            scores=scores,
            mask=sdpa.mask_kind(node),
            fits_ours=fits,
        )

    def _share(self, node: Node, block: int | None) -> float:
        shard = self.schema.blocks[block].values.get(node.name) if block is not None else None
        return self._shard_share(shard, node) if shard is not None else 1.0

    def _shard_share(self, shard: Shard, node: Node) -> float:
        whole = [self.size(s) for s in query.shape(node)]
        local = [math.prod(shard.local_shape(whole, rank)) for rank in range(self.schema.num_ranks)]
        return max(local) / math.prod(whole)

    def _reductions(self) -> list[Reduction]:
        points = reduce_points(self.gm, self.schema)
        served: list[tuple[int, Node]] = []
        for i, block in enumerate(self.schema.blocks):
            for name in (block.sink, *block.lookups):
                point = point_of(self.nodes[name], points) if name is not None else None
                if point is not None:
                    served.append((i, point))
            # Gathering logits moves as many bytes as reducing them would.
            served += [(i, self.nodes[name]) for name in block.heads]
        sharing = Counter(point for _, point in served)
        return [Reduction(i, self._bytes(point), 1 / sharing[point]) for i, point in served]

    def _numel(self, node: Node) -> int:
        return math.prod(self.size(s) for s in query.shape(node))

    def _weight_bytes(self, weight: Node) -> float:
        """Of codes, where the plan is for such."""
        for parameter in _parameters(weight):
            if (codes := self.schema.codes.get(str(parameter.target))) is not None:
                return self._numel(weight) * codes.bytes_per_weight
        return self._bytes(weight)

    def _bytes(self, node: Node) -> int:
        return self._numel(node) * int(query.value(node).dtype.itemsize)


def _members(block: Block) -> set[str]:
    own = {name.partition(".")[0] for name in block.values} | {*block.lookups, *block.heads}
    return own | ({block.sink} if block.sink is not None else set())


def _parameters(weight: Node) -> list[Node]:
    """The parameter behind views of it."""
    while weight.op != "get_attr":
        weight = weight.all_input_nodes[0]
    return [weight]


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_fused(node: Node) -> bool:
    """Inductor computes it inside its only reader."""
    readers = [u for u in node.users if not query.is_shape_query(u)]
    return _is_pointwise(node) and len(readers) == 1 and _is_pointwise(readers[0])


def _sources(node: Node) -> list[Node]:
    """The tensors a fused loop reads from memory."""
    found: list[Node] = []
    for source in node.all_input_nodes:
        if _is_fused(source):
            found += _sources(source)
        elif isinstance(query.value(source), torch.Tensor) and node.target is not aten.embedding.default:
            found.append(source)  # of an embedding's table only the rows it returns
    return found
