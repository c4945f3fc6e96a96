"""Write a rank's matrix products so that Inductor packs their weights and fuses what follows.

Its patterns for packed weights know `linear` on contiguous rows. GPT-2's view, addmm, view keeps the GELU after it out
of the product (16 % of a frozen GPT-2 in bf16), and a product of the last position only, a strided slice, falls back
to a loop that is slower than all other layers' products of that position together.
"""

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from numadist.graph import query
from numadist.graph.query import aten

_VIEWS = (aten.view.default, aten.reshape.default)


def write_linears(gm: GraphModule) -> None:
    """Rewrite in place: view, addmm, view becomes linear; the input of a linear becomes contiguous."""
    for node in list(gm.graph.nodes):
        if linear_between_views(node):
            _addmm_to_linear(gm, node)
    for node in gm.graph.nodes:
        if node.target is aten.linear.default:
            _make_contiguous(gm, node)


def linear_between_views(addmm: Node) -> bool:
    """Whether the node is addmm(bias, view(x), weight) whose rows are viewed back."""
    if addmm.target is not aten.addmm.default or addmm.kwargs or len(addmm.users) != 1:
        return False
    (back,) = addmm.users
    rows = query.operand(addmm, 1)
    if rows.target not in _VIEWS or back.target not in _VIEWS:
        return False
    return (
        _only_flattened(query.operand(rows, 0), rows, back)
        and query.value(query.operand(addmm, 0)).dim() == 1
    )


def _addmm_to_linear(gm: GraphModule, addmm: Node) -> None:
    """addmm(bias, view(x), weight), viewed back, becomes linear(x, weight.t(), bias)."""
    bias, _, weight = addmm.args
    (back,) = addmm.users
    source = query.operand(query.operand(addmm, 1), 0)
    with gm.graph.inserting_before(back):
        transposed = gm.graph.call_function(aten.t.default, (weight,))
        linear = gm.graph.call_function(aten.linear.default, (source, transposed, bias))
    linear.meta.update(back.meta)
    back.replace_all_uses_with(linear)


def _only_flattened(source: Node, rows: Node, back: Node) -> bool:
    """Whether `rows` [n, k] is source [..., k] with its rows in one dim, and `back` [..., m] undoes just that.

    Nodes that sharding has inserted carry no sizes: then nothing is claimed.
    """
    if any(query.value(node) is None for node in (source, rows, back)):
        return False
    whole, flat, again = query.shape(source), query.shape(rows), query.shape(back)
    if len(flat) != 2 or len(whole) != len(again) or len(whole) < 3:
        return False
    pairs = [(flat[-1], whole[-1]), *zip(whole[:-1], again[:-1], strict=True)]
    return all(statically_known_true(a == b) for a, b in pairs)


def _make_contiguous(gm: GraphModule, linear: Node) -> None:
    source = query.operand(linear, 0)
    if query.value(source) is None or query.value(source).is_contiguous():
        return
    with gm.graph.inserting_before(linear):
        rows = gm.graph.call_function(aten.contiguous.default, (source,))
    linear.replace_input_with(source, rows)
