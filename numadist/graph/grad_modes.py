"""no_grad() and enable_grad() inside a model: what torch.export keeps as a call of a subgraph becomes plain ops.

Planning looks at plain ops only. What a region without gradients gives to the rest is detached, so that no gradient
flows into it.
"""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.errors import ShardError
from numadist.graph import query
from numadist.graph.query import aten

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def is_region(node: Node) -> bool:
    return node.target is _REGION


def inline_grad_modes(gm: GraphModule) -> None:
    """Replace every region by its ops, in place. Raises: ShardError for enable_grad() inside of no_grad()."""
    while regions := [node for node in gm.graph.nodes if is_region(node)]:
        carries = _nodes_with_gradient(gm)
        for region in regions:
            _inline(gm, region, carries)
    for name, child in list(gm.named_children()):
        if name.startswith("submod_") and isinstance(child, GraphModule):
            delattr(gm, name)


def _inline(gm: GraphModule, region: Node, carries: set[Node]) -> None:
    enabled, operands = region.args[0], region.args[2:]
    source = query.operand(region, 1)
    body = getattr(gm, str(source.target))
    assert isinstance(body, GraphModule)
    if not enabled and any(is_region(n) and n.args[0] for n in body.graph.nodes):
        raise ShardError(
            "enable_grad() inside of no_grad() cannot be trained with; take one of them out of forward"
        )
    inner = iter(operands)
    made: dict[Node, Any] = {}
    with gm.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(inner)
            elif node.op == "get_attr":
                setattr(gm, str(node.target), getattr(body, str(node.target)))
                made[node] = gm.graph.get_attr(str(node.target))
            elif node.op != "output":
                made[node] = gm.graph.node_copy(node, made.__getitem__)
        results = [made[n] if isinstance(n, Node) else n for n in body.graph.output_node().args[0]]  # type: ignore[union-attr]
        blocked = any(isinstance(n, Node) and n in carries for n in operands)
        if not enabled and blocked:
            results = [_detached(gm, result) for result in results]
    for user in list(region.users):
        assert user.target is operator.getitem, f"{region.name} is used by {user.target}"
        result = results[query.integer(user, 1, "index")]
        assert isinstance(result, Node), f"{user.name}: a region gives {result!r}"
        user.replace_all_uses_with(result)
        gm.graph.erase_node(user)
    gm.graph.erase_node(region)
    if not source.users:
        gm.graph.erase_node(source)


def _detached(gm: GraphModule, result: Any) -> Any:
    if not isinstance(result, Node) or not _is_float(result):
        return result
    detached = gm.graph.call_function(aten.detach.default, (result,))
    detached.meta = dict(result.meta)
    return detached


def _nodes_with_gradient(gm: GraphModule) -> set[Node]:
    """What a gradient may flow through: parameters, floating-point inputs, and all that is computed from them."""
    parameters = dict(gm.named_parameters(remove_duplicate=False))
    found: set[Node] = set()
    for node in gm.graph.nodes:
        is_source = node.op == "placeholder" or (node.op == "get_attr" and node.target in parameters)
        if (is_source and _is_float(node)) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(node: Node) -> bool:
    val = query.value(node)
    return isinstance(val, torch.Tensor) and (val.is_floating_point() or val.is_complex())
