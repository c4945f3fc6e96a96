"""Linear layers over weights packed once, in oneDNN's own layout, for every graph that uses them.

Inductor's freezing packs for each compiled graph anew: reading prompts and decoding would hold two copies of the
weights, and the plain ones too. Here the graph itself asks for oneDNN's linear on a packed buffer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from numadist.kernels import int8, skinny
from numadist.shard.apply import drop_unused_parameters
from numadist.shard.graph import aten, linear_operands
from numadist.shard.linears import write_linears

# The number of rows oneDNN packs for. With few rows it may choose a layout that is slower at all of them.
PACKED_FOR_ROWS = 128


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN takes weights of the dtype packed."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def pack_linears(gm: GraphModule) -> None:
    """Give every linear layer of the graph a packed weight; plain ones that nothing else reads are dropped."""
    write_linears(gm)
    parameters = dict(gm.named_parameters(remove_duplicate=False))
    packed: dict[tuple[str, bool], str] = {}
    for node in list(gm.graph.nodes):
        linear = _linear(node)
        if linear is None:
            continue
        rows, weight, bias, transposed = linear
        name = str(weight.target)
        if name not in parameters or parameters[name].dim() != 2 or not can_pack(parameters[name].dtype):
            continue
        if (name, transposed) not in packed:
            packed[name, transposed] = f"packed_{len(packed)}"
            gm.register_buffer(
                packed[name, transposed], _pack(parameters[name].detach(), transposed), persistent=False
            )
        with gm.graph.inserting_before(node):
            blob = gm.graph.get_attr(packed[name, transposed])
            args: tuple[Any, ...] = (rows, blob, bias, "none", [], "")
            packed_linear = gm.graph.call_function(torch.ops.mkldnn._linear_pointwise.default, args)
        packed_linear.meta = dict(node.meta)
        node.replace_all_uses_with(packed_linear)
        gm.graph.erase_node(node)
    _keep_sums_apart(gm)
    gm.graph.eliminate_dead_code()
    drop_unused_parameters(gm)
    gm.recompile()


# What compilation may leave out, so that a sum stands directly behind a linear layer.
_MAY_VANISH = {
    aten.dropout.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.to.dtype,
    aten.view.default,
    aten.reshape.default,
}


def _keep_sums_apart(gm: GraphModule) -> None:
    """Write no sum as `linear + x`: freezing takes that for a layer and its bias, and fails on a packed weight.

    `x + linear` it leaves alone; of two linear layers the sum becomes a - (-b), which has the same bits.
    """
    for node in list(gm.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or not _is_linear(node.args[0]):
            continue
        a, b = node.args
        if not isinstance(b, Node):
            continue
        if _is_linear(b):
            with gm.graph.inserting_before(node):
                minus_b = gm.graph.call_function(aten.neg.default, (b,))
            node.target, node.args = aten.sub.Tensor, (a, minus_b)
        else:
            node.args = (b, a)


def _is_linear(node: Any) -> bool:
    while isinstance(node, Node) and node.target in _MAY_VANISH:
        node = node.args[0]
    return isinstance(node, Node) and node.target is torch.ops.mkldnn._linear_pointwise.default


def _linear(node: Node) -> tuple[Any, Node, Any, bool] | None:
    """(rows, weight, bias, weight is [K, N] instead of [N, K]) of a linear layer on a weight as it is or transposed."""
    operands = linear_operands(node)
    if operands is None:
        return None
    rows, weight, bias, k_dim = operands
    transposed = k_dim == -2
    while weight.target in (aten.t.default, aten.numpy_T.default):
        weight, transposed = weight.args[0], not transposed
    return (rows, weight, bias, transposed) if weight.op == "get_attr" else None


def use_skinny_linears(gm: GraphModule) -> None:
    """Decode by our own kernel where it reads a layer's packed weights as oneDNN does; other layers stay."""
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.mkldnn._linear_pointwise.default:
            continue
        rows, blob, bias, *_ = node.args
        packed = getattr(gm, blob.target)
        if (width := skinny.panel_width(packed)) is not None:
            node.target, node.args = (
                torch.ops.numadist.skinny_linear.default,
                (rows, blob, bias, packed.shape[0], width),
            )
    gm.recompile()


def use_int8_linears(gm: GraphModule) -> int:
    """Decode on int8 weights made of the packed ones, where the kernel takes them; bytes they add."""
    num_bytes = 0
    made: dict[str, tuple[str, str]] = {}
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.mkldnn._linear_pointwise.default:
            continue
        rows, blob, bias, *_ = node.args
        packed = getattr(gm, blob.target)
        if not int8.takes(packed.shape[1], packed.dtype):
            continue
        if blob.target not in made:
            made[blob.target] = names = f"int8_{len(made)}", f"int8_scale_{len(made)}"
            q_NK, scale_N = int8.quantize(packed.to_dense())
            for name, t in zip(names, (int8.pack(q_NK), scale_N), strict=True):
                gm.register_buffer(name, t, persistent=False)
                num_bytes += t.numel() * t.element_size()
        with gm.graph.inserting_before(node):
            weights = [gm.graph.get_attr(name) for name in made[blob.target]]
        node.target, node.args = torch.ops.numadist.int8_linear.default, (rows, *weights, bias)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return num_bytes


def _pack(weight: Tensor, transposed: bool) -> Tensor:
    rows_NK = weight.t().contiguous() if transposed else weight
    return torch.ops.mkldnn._reorder_linear_weight(rows_NK, PACKED_FOR_ROWS)
