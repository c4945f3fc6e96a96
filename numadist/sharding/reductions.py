"""Where partial sums are reduced: once, as late as linearity allows."""

from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import aten
from numadist.sharding.schema import Schema

# The sum over ranks may be taken after these instead of before. Casts are not here: rounding is not linear.
_LINEAR = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.index.Tensor,
    aten.sum.dim_IntList,
    aten.dropout.default,
}
# Linear only if both operands are partial; a replicated operand would be added once per rank.
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
# Linear in one operand while every rank has the other whole: how experts' outputs are weighed.
_PRODUCTS = {aten.mul.Tensor}


def reduce_points(gm: GraphModule, schema: Schema, train: bool = False) -> list[Node]:
    """Nodes whose value must be all-reduced, in graph order.

    A partial value moves on through linear ops while it has one user; where two partial values meet in an add they
    need one all-reduce, not two. Ops of a sharded block take their part of a sum, not of a summand.
    train: sums are taken before products, whose other operand would get a part of its gradient only.
    """
    sums = schema.partial_values()
    sharded = {name.partition(".")[0] for block in schema.blocks for name in block.values}
    partial: set[Node] = set()
    points: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.name in sums:
            partial.add(node)
            continue
        inputs = [n for n in node.all_input_nodes if n in partial]
        if not inputs or query.is_shape_query(node):
            continue
        if node.name not in sharded and _stays_partial(node, partial, train):
            partial.add(node)
        else:
            points.update(dict.fromkeys(inputs))
    return [node for node in gm.graph.nodes if node in points]


def _stays_partial(node: Node, partial: set[Node], train: bool) -> bool:
    if any(_num_users(n) > 1 for n in node.all_input_nodes if n in partial):
        return False
    if node.target in _LINEAR:
        return node.args[0] in partial and not (node.target is aten.dropout.default and node.args[2])
    if node.target in _SUMS:
        a, b = node.args
        return a is not b and all(isinstance(x, Node) and x in partial for x in (a, b))
    if node.target in _PRODUCTS:
        return not train and sum(x in partial for x in node.args) == 1
    return False


def _num_users(node: Node) -> int:
    return sum(not query.is_shape_query(u) for u in node.users)


def point_of(sink: Node, points: list[Node]) -> Node | None:
    """The node whose all-reduce serves the sink: its value moves on through linear ops with one user each."""
    node: Node | None = sink
    while node is not None and node not in points:
        users = [u for u in node.users if not query.is_shape_query(u)]
        node = users[0] if users else None
    return node
