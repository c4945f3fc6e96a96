"""Packed linear layers written so that their weights may be inputs of compiled code, with activations fused."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

import numadist.kernels.packed  # noqa: F401  # the operator
from numadist.graph import query
from numadist.graph.query import aten

_PACKED_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_ACTIVATIONS: dict[Any, str] = {
    aten.silu.default: "swish",
    aten.relu.default: "relu",
    aten.tanh.default: "tanh",
}


def write_packed_linears(gm: GraphModule) -> None:
    """oneDNN's linear layers become `numadist::packed_linear`, together with the activation that alone follows."""
    for node in list(gm.graph.nodes):
        if node.target is not _PACKED_LINEAR:
            continue
        name, algorithm = "none", ""
        last = node
        follows = next(iter(node.users)) if len(node.users) == 1 else None
        if follows is not None and (found := _activation(follows)):
            last, (name, algorithm) = follows, found
        with gm.graph.inserting_before(last):
            ours = gm.graph.call_function(
                torch.ops.numadist.packed_linear.default, (*node.args[:3], name, algorithm)
            )
        last.replace_all_uses_with(ours)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _activation(node: Node) -> tuple[str, str] | None:
    """oneDNN's names for what the node does to its only input."""
    if node.target is aten.gelu.default:
        return "gelu", str(query.argument(node, 1, "approximate", "none"))
    name = _ACTIVATIONS.get(node.target)
    return (name, "") if name else None
