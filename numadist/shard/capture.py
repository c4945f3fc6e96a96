"""From an unmodified model to one exported graph, with the noise of tracing removed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.errors import ShardError
from numadist.shard import graph
from numadist.shard.graph import aten

_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.type_as.default}


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
    _drop_noise(gm)
    return gm


def _drop_noise(gm: GraphModule) -> None:
    """Remove metadata assertions and casts that change nothing: they only hide what is linear."""
    for node in list(gm.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
        elif node.target in _CASTS and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


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
