"""Writes into fresh tensors become values: only so does the walk back through the graph see where they come from.

A tensor filled by copies into slices of it is a concatenation, and `x.add_(y)` on an x that nobody else reads a sum.
"""

import torch
from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import aten

_EMPTY = {aten.new_empty.default, aten.empty.memory_format}
_OUT_OF_PLACE = {aten.add_.Tensor: aten.add.Tensor, aten.mul_.Tensor: aten.mul.Tensor}


def functionalize(gm: GraphModule) -> None:
    """Turn writes into fresh tensors into values; other writes stay as they are."""
    for node in list(gm.graph.nodes):
        if node.target in _EMPTY:
            _write_concatenation(gm, node)
        elif writes_into_fresh_tensor(node):
            node.target = _OUT_OF_PLACE[node.target]


def writes_into_fresh_tensor(node: Node) -> bool:
    """The node adds to, or multiplies, a tensor that nobody else has seen."""
    if node.target not in _OUT_OF_PLACE:
        return False
    x, y = query.operand(node, 0), node.args[1]
    # Not all that return their input say so in their schema: dropout in eval does not.
    is_fresh = _returns_new_memory(x) or query.linear_operands(x) is not None
    dtype = torch.result_type(query.value(x), query.value(y) if isinstance(y, Node) else y)  # type: ignore[arg-type]
    return is_fresh and len(x.users) == 1 and dtype == query.value(x).dtype


def _returns_new_memory(node: Node) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.pointwise not in op.tags:
        return False
    return not any(r.alias_info for r in op._schema.returns)


def _write_concatenation(gm: GraphModule, empty: Node) -> None:
    """x = empty; x[..., :a] = u; x[..., a:] = v becomes cat([u, v], -1)."""
    pieces = sorted((u for u in empty.users if _is_piece(u)), key=_start)
    writes = [next(iter(piece.users)) for piece in pieces]
    if not pieces or not _fill(empty, pieces, writes) or not _stand_together(empty, pieces, writes):
        return
    order = list(gm.graph.nodes)
    with gm.graph.inserting_after(max(writes, key=order.index)):
        whole = gm.graph.call_function(aten.cat.default, ([w.args[1] for w in writes], pieces[0].args[1]))
    whole.meta = dict(empty.meta)
    for reader in list(empty.users):
        if reader not in pieces:
            reader.replace_input_with(empty, whole)
    for write in writes:
        gm.graph.erase_node(write)


def _is_piece(node: Node) -> bool:
    """A slice from one number to another, used once, as what is written to."""
    literal = len(node.args) == 4 and all(isinstance(a, int) for a in node.args[1:])
    if node.target is not aten.slice.Tensor or not literal or len(node.users) != 1:
        return False
    (write,) = node.users
    return (
        write.target is aten.copy_.default
        and write.args[0] is node
        and len(write.args) == 2
        and not write.users
    )


def _start(piece: Node) -> int:
    return query.integer(piece, 2, "start")


def _fill(empty: Node, pieces: list[Node], writes: list[Node]) -> bool:
    """The pieces follow each other along one dim, and every one is written whole."""
    dim, at = query.integer(pieces[0], 1, "dim"), 0
    size = query.shape(empty)[dim]
    if not query.is_static(size):
        return False
    for piece, write in zip(pieces, writes, strict=True):
        piece_dim, start, end = (
            query.integer(piece, i, n) for i, n in ((1, "dim"), (2, "start"), (3, "end"))
        )
        source, target = query.value(query.operand(write, 1)), query.value(piece)
        if piece_dim != dim or start != at or source.shape != target.shape or source.dtype != target.dtype:
            return False
        at = min(end, size)
    return bool(at == size)


def _stand_together(empty: Node, pieces: list[Node], writes: list[Node]) -> bool:
    """Nothing else is written between the first write and the last, and readers come later."""
    order = list(empty.graph.nodes)
    first, last = min(map(order.index, writes)), max(map(order.index, writes))
    between = (n for n in order[first:last] if n not in writes)
    if any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in between):
        return False
    return all(u in pieces or query.is_shape_query(u) or order.index(u) > last for u in empty.users)
