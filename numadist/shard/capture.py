"""From an unmodified model to one exported graph, with the noise of tracing removed."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.errors import ShardError
from numadist.shard import graph
from numadist.shard.graph import aten
from numadist.shard.order import order_canonically
from numadist.shard.simplify import simplify

_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout}


def capture(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
) -> GraphModule:
    """Export `model` at these inputs: a graph module with the model's call signature and parameter names.

    The graph is torch.export's pre-dispatch ATen: linear, gelu, layer_norm and attention are still whole.
    Raises: ShardError if the model cannot be exported (control flow that depends on data, graph breaks).
    """
    if isinstance(dynamic_shapes, dict):  # torch.export wants every input named, fixed ones with None
        dynamic_shapes = {**dict.fromkeys(kwargs), **dynamic_shapes}
    try:
        with torch.no_grad():
            program = torch.export.export(
                model, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as e:  # torch.export has no common base class for its failures
        raise ShardError(
            f"{type(model).__name__} cannot be captured as one graph by torch.export: {type(e).__name__}: {e}"
        ) from e
    gm = program.module()
    gm.meta["tied_names"] = _tied_names(model)
    _drop_noise(gm)
    simplify(gm)
    order_canonically(gm)
    return gm


def _tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Parameter name -> its other names; a checkpoint has only one of them."""
    names_of: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(param), []).append(name)
    return {n: [m for m in names if m != n] for names in names_of.values() if len(names) > 1 for n in names}


def _drop_noise(gm: GraphModule) -> None:
    """Remove metadata assertions and casts that change nothing: they only hide what is linear."""
    for node in list(gm.graph.nodes):
        if node.target is aten.type_as.default:  # needs nothing of its second tensor but the dtype
            node.target, node.args = aten.to.dtype, (node.args[0], graph.value(node).dtype)
        if node.target is aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
        elif node.target in _CASTS and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    _split_tiling_slices(gm)
    gm.recompile()


def _split_tiling_slices(gm: GraphModule) -> None:
    """Write slices that tile one dim, `qkv[..., :c]`, `qkv[..., c:]`, as the split they are."""
    for node in list(gm.graph.nodes):
        slices = list(node.users)
        if len(slices) < 2 or any(u.target is not aten.slice.Tensor or u.args[0] is not node for u in slices):
            continue
        size, dims, bounds = graph.shape(node), set(), []
        for user in slices:
            _, dim, start, stop, step = (*user.args, *(0, 0, 2**63 - 1, 1)[len(user.args) - 1 :])
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


def _replace_by_split(gm: GraphModule, node: Node, dim: int, bounds: list[tuple[int, int, Node]]) -> None:
    first = next(n for n in gm.graph.nodes if n in node.users)
    with gm.graph.inserting_before(first):
        sizes = [stop - start for start, stop, _ in bounds]
        split = gm.graph.call_function(aten.split_with_sizes.default, (node, sizes, dim))
        split.meta = {**first.meta, "val": [graph.value(user) for *_, user in bounds]}
        pieces = [gm.graph.call_function(operator.getitem, (split, i)) for i in range(len(bounds))]
    for piece, (*_, user) in zip(pieces, bounds, strict=True):
        piece.meta = dict(user.meta)
        user.replace_all_uses_with(piece)
        gm.graph.erase_node(user)


def _changes_nothing(node: Node) -> bool:
    source, result = graph.value(node.args[0]), graph.value(node)
    copies = node.kwargs.get("copy", False) or any(a is True for a in node.args[3:])
    return not copies and source.dtype == result.dtype and source.stride() == result.stride()


def as_args(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs): a tensor, a tuple of positional inputs, or a dict of keyword inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
