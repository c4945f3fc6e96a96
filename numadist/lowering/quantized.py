"""Which weights of a graph may be codes, and the graph written so that they are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import aten, linear_operands
from numadist.kernels.quantized import Packed

_TRANSPOSES = (aten.t.default, aten.numpy_T.default)
_LINEAR = torch.ops.numadist.quantized_linear.default
_EMBEDDING = torch.ops.numadist.quantized_embedding.default


@dataclass(frozen=True)
class CodedWeight:
    """A parameter that only linear layers and embeddings read. names: of the tied ones, as the graph has them.

    is_transposed: the parameter is [K, N], not [N, K]. users: (layer or lookup, its rows or tokens, its bias).
    """

    names: list[str]
    parameter: Tensor
    is_transposed: bool
    users: list[tuple[Node, Node, Any]]

    @property
    def out_dim(self) -> int:
        """Of the parameter: the outputs of a layer, the rows of a table."""
        return 1 if self.is_transposed else 0


def coded_weights(gm: GraphModule) -> list[CodedWeight]:
    """All that could be codes."""
    names_of: dict[int, list[str]] = {}
    parameters = dict(gm.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        names_of.setdefault(id(parameter), []).append(name)
    nodes_of: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            nodes_of.setdefault(str(node.target), []).append(node)
    found = []
    for names in names_of.values():
        users = _users([node for name in names for node in nodes_of.get(name, [])])
        layouts = {transposed for _, _, _, transposed in users}
        parameter = parameters[names[0]]
        if len(layouts) == 1 and parameter.dim() == 2 and parameter.is_floating_point():
            found.append(CodedWeight(names, parameter, layouts.pop(), [user[:3] for user in users]))
    return found


def _users(nodes: list[Node]) -> list[tuple[Node, Node, Any, bool]]:
    """(user, its rows or tokens, its bias, whether the weight is transposed); empty where one is something else."""
    found: list[tuple[Node, Node, Any, bool]] = []
    todo = [(node, user, False) for node in nodes for user in node.users]
    while todo:
        weight, user, turned = todo.pop(0)
        if user.target in _TRANSPOSES:
            todo += [(user, later, not turned) for later in user.users]
            continue
        if user.target is aten.embedding.default and user.args[0] is weight and not turned:
            found.append((user, query.operand(user, 1), None, False))
            continue
        operands = linear_operands(user)
        if operands is None or operands[1] is not weight or operands[0] is weight:
            return []
        rows, _, bias, k_dim = operands
        found.append((user, rows, bias, turned != (k_dim == -2)))
    return found


def use_codes(gm: GraphModule, weight: CodedWeight, packed: Packed, number: int) -> None:
    """Let all users of the weight read the codes, which become parameters of the graph; the weight is gone then."""
    kept: dict[str, Tensor | None] = {
        "codes": packed.codes,
        "scales": packed.scales,
        "order": packed.order,
    }
    for name, tensor in kept.items():
        if tensor is not None:
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            gm.register_parameter(f"packed_{name}_{number}", parameter)
    layout = packed.out_features, packed.in_features, int(packed.kind), packed.shared
    for user, rows, bias in weight.users:
        with gm.graph.inserting_before(user):
            tensors = [
                None if tensor is None else gm.graph.get_attr(f"packed_{name}_{number}")
                for name, tensor in kept.items()
            ]
            new = (
                gm.graph.call_function(_EMBEDDING, (rows, *tensors, *layout, weight.parameter.dtype))
                if user.target is aten.embedding.default
                else gm.graph.call_function(_LINEAR, (rows, *tensors, bias, *layout))
            )
        new.meta = dict(user.meta)
        user.replace_all_uses_with(new)
        gm.graph.erase_node(user)


def reads_codes(node: Node) -> bool:
    """Whether the node is a layer or a lookup on codes."""
    return node.target in (_LINEAR, _EMBEDDING)
