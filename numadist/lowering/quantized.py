"""Which weights of a graph may be codes, and the graph written so that they are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import aten, linear_operands
from numadist.graph.tied import named_once
from numadist.kernels.quantized import Packed

_TRANSPOSES = (aten.t.default, aten.numpy_T.default)
# By name, as transformers may be absent.
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_LINEAR = torch.ops.numadist.quantized_linear.default
_EXPERTS = torch.ops.numadist.quantized_experts.default
_EMBEDDING = torch.ops.numadist.quantized_embedding.default


@dataclass(frozen=True)
class CodedWeight:
    """A parameter that only linear layers and embeddings read. names: of the tied ones, as the graph has them.

    is_transposed: the parameter is [K, N], not [N, K]; of a mixture it has the experts before. users: (layer or lookup,
    its rows or tokens, its bias).
    """

    names: list[str]
    parameter: Tensor
    is_transposed: bool
    users: list[tuple[Node, Node, Any]]

    @property
    def out_dim(self) -> int:
        """Of the parameter: the outputs of a layer, the rows of a table."""
        return self.parameter.dim() - (1 if self.is_transposed else 2)

    @property
    def in_dim(self) -> int:
        return self.parameter.dim() - (2 if self.is_transposed else 1)

    @property
    def num_experts(self) -> int:
        return self.parameter.shape[0] if self.parameter.dim() == 3 else 1


def coded_weights(gm: GraphModule) -> list[CodedWeight]:
    """All that could be codes."""
    nodes_of: dict[str, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            nodes_of.setdefault(str(node.target), []).append(node)
    found = []
    for names, parameter in named_once(gm):
        users = _users([node for name in names for node in nodes_of.get(name, [])], parameter.dim())
        layouts = {transposed for _, _, _, transposed in users}
        if len(layouts) == 1 and parameter.is_floating_point():
            found.append(CodedWeight(names, parameter, layouts.pop(), [user[:3] for user in users]))
    return found


def routers(gm: GraphModule) -> set[Node]:
    """The layers whose outputs choose among experts: a rounded one would choose others."""
    todo = [node for node in gm.graph.nodes if node.target is aten.topk.default]
    found, seen = set(), set(todo)
    while todo:
        node = todo.pop()
        if linear_operands(node) is not None:
            found.add(node)
            continue
        todo += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return found


def _users(nodes: list[Node], num_dims: int) -> list[tuple[Node, Node, Any, bool]]:
    """(user, its rows or tokens, its bias, whether the weight is transposed); empty where one is something else.

    num_dims: of the weight, 2, or 3 of a mixture.
    """
    found: list[tuple[Node, Node, Any, bool]] = []
    todo = [(node, user, False) for node in nodes for user in node.users]
    while todo:
        weight, user, turned = todo.pop(0)
        if user.target in _TRANSPOSES or _turns_experts(user):
            todo += [(user, later, not turned) for later in user.users]
            continue
        if user.target is aten.embedding.default and user.args[0] is weight and not turned:
            found.append((user, query.operand(user, 1), None, False))
            continue
        operands = linear_operands(user)
        if operands is None or operands[1] is not weight or operands[0] is weight:
            return []
        if num_dims != (2 if _ends(user) is None else 3):
            return []
        rows, _, bias, k_dim = operands
        found.append((user, rows, bias, turned != (k_dim == -2)))
    return found


def _turns_experts(node: Node) -> bool:
    """Whether it exchanges the last two of three dims."""
    return node.target is aten.transpose.int and {int(str(dim)) % 3 for dim in node.args[1:]} == {1, 2}


def _ends(node: Node) -> Node | None:
    """Where the rows of each expert end; None for a layer of one weight for all rows."""
    if str(node.target) not in _GROUPED or query.argument(node, 3, "bias") is not None:
        return None
    found: Node | None = query.argument(node, 2, "offs")
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
            if user.target is aten.embedding.default:
                args = _EMBEDDING, (rows, *tensors, *layout, weight.parameter.dtype)
            elif (ends := _ends(user)) is not None:
                args = _EXPERTS, (rows, ends, *tensors, *layout)
            else:
                args = _LINEAR, (rows, *tensors, bias, *layout)
            new = gm.graph.call_function(*args)
        new.meta = dict(user.meta)
        user.replace_all_uses_with(new)
        gm.graph.erase_node(user)


def reads_codes(node: Node) -> bool:
    """Whether the node is a layer or a lookup on codes."""
    return node.target in (_LINEAR, _EXPERTS, _EMBEDDING)
