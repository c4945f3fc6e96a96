"""Linear layers over weights packed once, in oneDNN's own layout or ours, for every graph that uses them.

Inductor's freezing packs for each compiled graph anew: reading prompts and decoding would hold two copies of the
weights, and the plain ones too. Here the graph itself asks for oneDNN's linear on a packed buffer; or for ours, where
oneDNN has no fast products of 16-bit weights.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.cleanup import drop_unused_parameters
from numadist.graph.query import aten, linear_operands
from numadist.kernels import half, skinny
from numadist.log import get_logger

log = get_logger(__name__)

# The number of rows oneDNN packs for. With few rows it may choose a layout that is slower at all of them.
PACKED_FOR_ROWS = 128

_PACKED_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_HALF_LINEAR = torch.ops.numadist.half_linear.default


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of the dtype can be packed on this machine, by oneDNN or by us."""
    if half.pays(dtype):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


@dataclass(frozen=True)
class PackableLinear:
    """A linear layer on a parameter as it is, [N, K], or transposed."""

    rows: Node
    weight: Tensor
    name: str
    bias: Any
    transposed: bool


def packable_linear(gm: GraphModule, node: Node) -> PackableLinear | None:
    """The node as a linear layer whose weight can be packed; None for any other."""
    operands = linear_operands(node)
    if operands is None:
        return None
    rows, weight, bias, k_dim = operands
    transposed = k_dim == -2
    while weight.target in (aten.t.default, aten.numpy_T.default):
        weight, transposed = query.operand(weight, 0), not transposed
    if weight.op != "get_attr":
        return None
    found = dict(gm.named_parameters(remove_duplicate=False)).get(str(weight.target))
    if found is None or found.dim() != 2 or not can_pack(found.dtype):
        return None
    return PackableLinear(rows, found, str(weight.target), bias, transposed)


def pack_linears(gm: GraphModule) -> None:
    """Give every linear layer of the graph a packed weight, one for all its users."""
    _pack_those(gm, lambda dtype: True)


def pack_halves(gm: GraphModule) -> None:
    """The same for weights of 16 bits that our kernel takes, for a graph whose others Inductor packs."""
    if _pack_those(gm, half.pays):
        gm.graph.eliminate_dead_code()
        drop_unused_parameters(gm)


def has_halves(gm: GraphModule) -> bool:
    """Whether layers have been packed for our kernel on weights of 16 bits."""
    return any(n.target is _HALF_LINEAR for n in gm.graph.nodes)


def _pack_those(gm: GraphModule, wanted: Callable[[torch.dtype], bool]) -> int:
    """Pack the weights of wanted dtypes. Returns how many."""
    packed: dict[tuple[str, bool], str] = {}
    ours: Counter[torch.dtype] = Counter()
    for node in list(gm.graph.nodes):
        linear = packable_linear(gm, node)
        if linear is None or not wanted(linear.weight.dtype):
            continue
        is_ours = half.pays(linear.weight.dtype)
        key = linear.name, linear.transposed
        if key not in packed:
            packed[key] = f"packed_{len(packed)}"
            pack = _pack_half if is_ours else _pack
            gm.register_buffer(packed[key], pack(linear.weight.detach(), linear.transposed), persistent=False)
        ours[linear.weight.dtype] += is_ours
        with gm.graph.inserting_before(node):
            blob = gm.graph.get_attr(packed[key])
            num_out = linear.weight.shape[1 if linear.transposed else 0]
            new = (
                gm.graph.call_function(_HALF_LINEAR, (linear.rows, blob, linear.bias, num_out))
                if is_ours
                else gm.graph.call_function(_PACKED_LINEAR, (linear.rows, blob, linear.bias, "none", [], ""))
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    for dtype, count in ours.items():
        if count:
            log.info("%d linear layers: %s", count, half.kernel_name(dtype))
    return len(packed)


def use_skinny_linears(gm: GraphModule) -> None:
    """Decode by our own kernel where it reads a layer's packed weights as oneDNN does; other layers stay."""
    for node in list(gm.graph.nodes):
        if node.target is not _PACKED_LINEAR:
            continue
        rows, blob, bias, *_ = node.args
        packed = getattr(gm, blob.target)
        if (width := skinny.panel_width(packed)) is not None:
            node.target, node.args = (
                torch.ops.numadist.skinny_linear.default,
                (rows, blob, bias, packed.shape[0], width),
            )


def _pack_half(weight: Tensor, transposed: bool) -> Tensor:
    return half.pack(weight.t() if transposed else weight)


def _pack(weight: Tensor, transposed: bool) -> Tensor:
    rows_NK = weight.t().contiguous() if transposed else weight
    return torch.ops.mkldnn._reorder_linear_weight(rows_NK, PACKED_FOR_ROWS)
