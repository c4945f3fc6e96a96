"""Remove what tracing leaves in a graph and only hides what is linear."""

import operator
from typing import Any

from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import aten

_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout}


def drop_noise(gm: GraphModule) -> None:
    """Remove metadata assertions and casts that change nothing: they only hide what is linear."""
    for node in list(gm.graph.nodes):
        if node.target is aten.type_as.default:  # needs nothing of its second tensor but the dtype
            node.target, node.args = aten.to.dtype, (query.operand(node, 0), query.value(node).dtype)
        if is_noise(node):
            if node.users:
                node.replace_all_uses_with(query.operand(node, 0))
            gm.graph.erase_node(node)


def is_noise(node: Node) -> bool:
    """The node checks metadata only, or casts to what its input is."""
    if node.target is aten._assert_tensor_metadata.default:
        return True
    return node.target in _CASTS and _changes_nothing(node)


def split_tiling_slices(gm: GraphModule) -> None:
    """Write slices that tile one dim, `qkv[..., :c]`, `qkv[..., c:]`, as the split they are."""
    for node in list(gm.graph.nodes):
        slices = list(node.users)
        if len(slices) < 2 or any(u.target is not aten.slice.Tensor or u.args[0] is not node for u in slices):
            continue
        size, dims, bounds = query.shape(node), set(), []
        for user in slices:
            _, dim, start, stop, step = slice_arguments(user)
            dims.add(dim % len(size))
            if not all(isinstance(x, int) for x in (start, stop, step, size[dim])) or step != 1:
                break
            bounds.append((start % size[dim], min(stop, size[dim]) if stop > 0 else stop + size[dim], user))
        bounds.sort(key=lambda b: b[:2])
        edges = [0, *(stop for _, stop, _ in bounds)]
        if len(dims) == 1 and len(bounds) == len(slices) and [start for start, *_ in bounds] == edges[:-1]:
            dim = dims.pop()
            if edges[-1] == size[dim]:
                _replace_by_split(gm, node, dim, bounds)


def slice_arguments(node: Node) -> tuple[Node, int, Any, Any, Any]:
    """Source, dim, start, stop and step of an aten.slice; the last three may be symbolic."""
    names = (("dim", 0), ("start", 0), ("end", 2**63 - 1), ("step", 1))
    dim, start, stop, step = (query.argument(node, i, n, d) for i, (n, d) in enumerate(names, start=1))
    return query.operand(node, 0), dim, start, stop, step


def _replace_by_split(gm: GraphModule, node: Node, dim: int, bounds: list[tuple[int, int, Node]]) -> None:
    first = next(n for n in gm.graph.nodes if n in node.users)
    with gm.graph.inserting_before(first):
        sizes = [stop - start for start, stop, _ in bounds]
        split = gm.graph.call_function(aten.split_with_sizes.default, (node, sizes, dim))
        split.meta = {**first.meta, "val": [query.value(user) for *_, user in bounds]}
        pieces = [gm.graph.call_function(operator.getitem, (split, i)) for i in range(len(bounds))]
    for piece, (*_, user) in zip(pieces, bounds, strict=True):
        piece.meta = dict(user.meta)
        user.replace_all_uses_with(piece)
        gm.graph.erase_node(user)


def _changes_nothing(node: Node) -> bool:
    source, result = query.value(query.operand(node, 0)), query.value(node)
    copies = bool(node.kwargs.get("copy", False)) or any(a is True for a in node.args[3:])
    return not copies and source.dtype == result.dtype and source.stride() == result.stride()


def drop_guards(gm: GraphModule) -> None:
    """Remove the check of whole shapes that torch.export puts in front."""
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            gm.graph.erase_node(node)


def drop_unused_parameters(gm: GraphModule) -> None:
    """Forget parameters that no node reads (the second name of a tied weight, unused heads)."""
    used = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    for name, _ in list(gm.named_parameters(remove_duplicate=False)):
        if name not in used:
            owner, _, leaf = name.rpartition(".")
            delattr(gm.get_submodule(owner), leaf)
