"""Rewrites that change no result: masks known in advance, and GELU spelled out.

Hugging Face builds dense masks, which cost a third of attention, and writes tanh-GELU as eight ops, which keeps
Inductor from fusing it into the matrix product before it.
"""

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import aten

_MASK_ARG = 3  # scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)


def resolve_masks(gm: GraphModule) -> None:
    """A mask that depends on no input is evaluated now: causal becomes is_causal=True, all-true is dropped."""
    known: dict[Node, Any] = {}
    buffers = dict(gm.named_buffers(remove_duplicate=False))
    for node in gm.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        args = [*node.args, *(None, 0.0, False)[len(node.args) - _MASK_ARG :]]
        mask = args[_MASK_ARG] if args[_MASK_ARG] is not None else node.kwargs.get("attn_mask")
        if not isinstance(mask, Node) or args[_MASK_ARG + 2] or node.kwargs.get("is_causal"):
            continue
        meaning = _meaning(mask, buffers, known)
        if meaning is None:
            continue
        node.args = (*args[:_MASK_ARG], None, args[_MASK_ARG + 1], meaning == "causal")
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in {"attn_mask", "is_causal"}}


def _meaning(mask: Node, buffers: dict[str, torch.Tensor], known: dict[Node, Any]) -> str | None:
    """`causal`, `all` or None: anything else, or not known before the inputs are."""
    try:
        value = _evaluate(mask, buffers, known)
    except _DependsOnInput:
        return None
    if value.dtype != torch.bool:
        return None
    rows, columns = value.shape[-2:]
    if bool(value.all()):
        return "all"
    # torch's is_causal aligns the diagonal at the top left, so only a square mask has one meaning.
    if rows == columns and bool((value == torch.ones(rows, columns, dtype=torch.bool).tril()).all()):
        return "causal"
    return None


class _DependsOnInput(Exception):
    pass


def _evaluate(node: Node, buffers: dict[str, torch.Tensor], known: dict[Node, Any]) -> Any:
    """The node's value if no input and no parameter goes into it. Raises: _DependsOnInput."""
    for n in _ancestors(node, buffers, known):
        if n.op == "get_attr":
            known[n] = buffers[str(n.target)]
            continue
        args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), known.__getitem__)
        with torch.no_grad():
            assert callable(n.target)  # _ancestors has call_function and get_attr only
            known[n] = n.target(*args, **kwargs)
    return known[node]


def _ancestors(node: Node, buffers: dict[str, torch.Tensor], known: dict[Node, Any]) -> list[Node]:
    """All nodes that must be evaluated for `node`, in graph order."""
    todo, seen = [node], set()
    while todo:
        n = todo.pop()
        if n in seen or n in known:
            continue
        seen.add(n)
        is_buffer = n.op == "get_attr" and n.target in buffers
        if not is_buffer and (n.op != "call_function" or query.is_shape_query(n)):
            raise _DependsOnInput
        todo += n.all_input_nodes
    return [n for n in node.graph.nodes if n in seen]


def fold_gelu(gm: GraphModule) -> None:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) becomes gelu(x, approximate="tanh")."""
    for node in list(gm.graph.nodes):
        x = gelu_input(node)
        if x is None:
            continue
        with gm.graph.inserting_before(node):
            gelu = gm.graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"})
        gelu.meta = dict(node.meta)
        node.replace_all_uses_with(gelu)
        gm.graph.erase_node(node)


def gelu_input(node: Node) -> Node | None:
    """x if the node is tanh-GELU of x, in the order Hugging Face writes it."""
    half = _operands(node, aten.mul.Tensor)
    if half is None:
        return None
    for scaled, gate in (half, half[::-1]):
        x: Node | None = _times(scaled, 0.5)
        tanh = _plus(gate, 1.0)
        if x is None or tanh is None or tanh.target is not aten.tanh.default:
            continue
        inner = _times(tanh.args[0], math.sqrt(2 / math.pi))
        terms = _operands(inner, aten.add.Tensor)
        if terms is None or terms[0] is not x:
            continue
        cube = _times(terms[1], 0.044715)
        if cube is not None and cube.target is aten.pow.Tensor_Scalar and tuple(cube.args) == (x, 3.0):
            return x if isinstance(x, Node) else None
    return None


def _operands(node: Any, op: Any) -> tuple[Any, Any] | None:
    matches = isinstance(node, Node) and node.target is op and len(node.args) == 2 and not node.kwargs
    return (node.args[0], node.args[1]) if matches else None


def _with_constant(node: Any, op: Any, constant: float) -> Node | None:
    operands = _operands(node, op)
    if operands is None or not isinstance(operands[0], Node) or not isinstance(operands[1], int | float):
        return None
    return operands[0] if math.isclose(operands[1], constant, rel_tol=1e-6) else None


def _times(node: Any, constant: float) -> Node | None:
    return _with_constant(node, aten.mul.Tensor, constant)


def _plus(node: Any, constant: float) -> Node | None:
    return _with_constant(node, aten.add.Tensor, constant)
