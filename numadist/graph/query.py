"""Questions about an exported graph: what a node is, what it depends on, which dims of a reshape belong together."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
Sizes = tuple[Any, ...]  # ints, and SymInts where a size is dynamic

# Views and casts of a parameter are still the parameter: `linear(x, w.t())`.
_WEIGHT_VIEWS = {
    aten.t.default,
    aten.numpy_T.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
}


def value(node: Node) -> Any:
    """What the node computes, as fake tensors (torch.export keeps them in `meta`)."""
    return node.meta.get("val")


def shape(node: Node) -> Sizes:
    """Sizes of the node's tensor; dynamic sizes are SymInts."""
    return tuple(value(node).shape)


def operand(node: Node, place: int) -> Node:
    """The tensor that is the node's argument in this place; the op's schema says that there is one."""
    found = node.args[place]
    assert isinstance(found, Node), f"{node.name}: argument {place} of {node.target} is {found!r}"
    return found


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """The node's argument in this place, or given by name; else the default."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def integer(node: Node, place: int, name: str, default: int | None = None) -> int:
    """The same of an argument that is a number."""
    found = argument(node, place, name, default)
    assert isinstance(found, int), f"{node.name}: {name} of {node.target} is {found!r}"
    return found


def integers(node: Node, place: int, name: str) -> list[int]:
    """The same of an argument that is a list of numbers."""
    return [int(n) for n in sequence(node, place, name)]


def sequence(node: Node, place: int, name: str) -> Sequence[Any]:
    """The same of an argument that is a list, of sizes perhaps symbolic, or of tensors."""
    found = argument(node, place, name)
    assert isinstance(found, list | tuple), f"{node.name}: {name} of {node.target} is {found!r}"
    return found


def set_tensor(gm: GraphModule, name: str, value: torch.Tensor) -> None:
    """Let the graph's parameter or buffer of this name be another."""
    owner, _, leaf = name.rpartition(".")
    setattr(gm.get_submodule(owner), leaf, value)


def is_static(size: Any) -> bool:
    return isinstance(size, int)


def hint(size: Any) -> int:
    """The size in the example inputs."""
    return size if isinstance(size, int) else int(size.node.hint)


def same_size(a: Any, b: Any) -> bool:
    """Equal for every input, not only for the example."""
    if is_static(a) and is_static(b):
        return bool(a == b)
    expr = [s if is_static(s) else s.node.expr for s in (a, b)]
    return bool(expr[0] == expr[1])


def is_shape_query(node: Node) -> bool:
    """The node asks for a size or checks metadata: it never sees the tensor's elements."""
    return node.op == "call_function" and node.target in {
        aten.sym_size.int,
        aten.sym_numel.default,
        aten._assert_tensor_metadata.default,
    }


def module_path(node: Node) -> str:
    """Path of the module whose forward made the node, e.g. `model.layers.0.mlp`."""
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if not path.startswith("_empty"):
            return str(path)
    return ""


def op_name(node: Node) -> str:
    """`aten.linear.default` and the like, for messages."""
    return str(node.target) if node.op == "call_function" else f"{node.op} {node.target}"


class Dependencies:
    """Which nodes depend on parameters, and which are nothing but views of one."""

    def __init__(self, gm: GraphModule):
        self.parameters = dict(gm.named_parameters(remove_duplicate=False))
        self.nodes = list(gm.graph.nodes)
        self._weighted: set[Node] = set()
        self._weight_only: set[Node] = set()
        for node in self.nodes:
            if self.is_parameter(node):
                self._weighted.add(node)
                self._weight_only.add(node)
            elif any(i in self._weighted for i in node.all_input_nodes):
                self._weighted.add(node)
                if node.target in _WEIGHT_VIEWS and node.all_input_nodes[0] in self._weight_only:
                    self._weight_only.add(node)

    def same_parameter(self, node: Node) -> list[Node]:
        """All nodes that read this node's parameter, under whatever tied name."""
        param = self.parameters[str(node.target)]
        return [
            n
            for n in self.nodes
            if self.is_parameter(n) and n.users and self.parameters[str(n.target)] is param
        ]

    def is_parameter(self, node: Node) -> bool:
        return node.op == "get_attr" and node.target in self.parameters

    def is_pure(self, node: Node) -> bool:
        """Depends on no parameter: a mask, a rotary table, a position; every rank can compute it whole."""
        return node not in self._weighted

    def is_weight(self, node: Node) -> bool:
        return node in self._weight_only


# Products of rows with one of several matrices each: the experts of a mixture. By name, as transformers may be absent.
_GROUPED = {"aten.bmm.default", "aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}


@dataclass(frozen=True)
class Contraction:
    """A linear layer in any spelling: out[..., N] = input[..., K] contracted with weight over K, plus bias[N].

    weight: K and N in any order, after the experts if each row has one of several.
    """

    node: Node
    input: Node
    weight: Node
    weight_k_dim: int
    bias: Node | None

    @property
    def size(self) -> int:
        """K, the length of the contracted dim."""
        return shape(self.weight)[self.weight_k_dim]  # type: ignore[no-any-return]  # perhaps a SymInt

    @property
    def weight_n_dim(self) -> int:
        ndim = len(shape(self.weight))
        return ndim - 1 if self.weight_k_dim == ndim - 2 else ndim - 2

    @property
    def num_experts(self) -> int:
        return shape(self.weight)[0] if len(shape(self.weight)) > 2 else 1


def linear_operands(node: Node) -> tuple[Any, Any, Any, int] | None:
    """(input, weight, bias, the weight's contracted dim, from its end) of a linear layer in any spelling, or None.

    By the operator alone: nothing is asked of sizes, which nodes made by a rewrite lack.
    """
    if node.target is aten.linear.default:
        x, w, *rest = node.args
        return x, w, (rest or [node.kwargs.get("bias")])[0], -1
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, w = node.args
        return x, w, bias, -2
    if node.target in {aten.mm.default, aten.matmul.default} or str(node.target) in _GROUPED:
        x, w = node.args[:2]
        return x, w, None, -2
    return None


def as_contraction(node: Node, deps: Dependencies) -> Contraction | None:
    """The node as a linear layer, or None: its weight must be a parameter or a view of one."""
    operands = linear_operands(node) if node.op == "call_function" else None
    if operands is None:
        return None
    x, weight, bias, k_dim = operands
    if not deps.is_weight(weight) or deps.is_weight(x):
        return None
    ndim = len(shape(weight))
    if ndim != (3 if str(node.target) in _GROUPED else 2):
        return None
    return Contraction(node, x, weight, ndim + k_dim, bias)


def reshape_groups(in_shape: Sizes, out_shape: Sizes) -> list[tuple[list[int], list[int]]]:
    """Pairs of (input dims, output dims) with equal products, left to right: how a reshape regroups dims.

    Sizes are ordered by their example values and compared as expressions, so a dynamic batch is told from a
    static dim of the same example size. A pair that cannot be closed takes all remaining dims.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(in_shape) or j < len(out_shape):
        ins, outs = [], []
        if i < len(in_shape):
            ins.append(i)
            i += 1
        if j < len(out_shape):
            outs.append(j)
            j += 1
        while not _same_product(ins, in_shape, outs, out_shape) and (i < len(in_shape) or j < len(out_shape)):
            behind = _product(ins, in_shape) <= _product(outs, out_shape)
            if (behind and i < len(in_shape)) or j >= len(out_shape):
                ins.append(i)
                i += 1
            else:
                outs.append(j)
                j += 1
        groups.append((ins, outs))
    return groups


def _product(dims: list[int], sizes: Sizes) -> int:
    return math.prod(hint(sizes[d]) for d in dims)


def _same_product(ins: list[int], in_shape: Sizes, outs: list[int], out_shape: Sizes) -> bool:
    a: Any = math.prod((in_shape[d] for d in ins), start=1)
    b: Any = math.prod((out_shape[d] for d in outs), start=1)
    return same_size(a, b)


def tensors(values: Iterable[Any]) -> list[Node]:
    """The nodes among an op's arguments, lists opened."""
    out: list[Node] = []
    for v in values:
        if isinstance(v, Node):
            out.append(v)
        elif isinstance(v, list | tuple):
            out += tensors(v)
    return out
