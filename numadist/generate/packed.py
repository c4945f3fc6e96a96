"""Linear layers over weights packed once, in oneDNN's own layout, for every graph that uses them.

Inductor's freezing packs for each compiled graph anew: reading prompts and decoding would hold two copies of the
weights, and the plain ones too. Here the graph itself asks for oneDNN's linear on a packed buffer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from numadist.shard.apply import drop_unused_parameters
from numadist.shard.graph import Dependencies, as_contraction

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
    deps = Dependencies(gm)
    packed: dict[tuple[str, int], str] = {}
    for node in list(gm.graph.nodes):
        layer = as_contraction(node, deps)
        if layer is None or not deps.is_parameter(layer.weight):
            continue
        weight: Tensor = deps.parameters[str(layer.weight.target)].detach()
        if not can_pack(weight.dtype):
            continue
        key = (str(layer.weight.target), layer.weight_k_dim)
        if key not in packed:
            packed[key] = f"packed_{len(packed)}"
            rows_NK = weight if layer.weight_k_dim == 1 else weight.t().contiguous()
            gm.register_buffer(
                packed[key],
                torch.ops.mkldnn._reorder_linear_weight(rows_NK, PACKED_FOR_ROWS),
                persistent=False,
            )
        with gm.graph.inserting_before(node):
            blob = gm.graph.get_attr(packed[key])
            args: Any = (layer.input, blob, layer.bias, "none", [], "")
            linear = gm.graph.call_function(torch.ops.mkldnn._linear_pointwise.default, args)
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    drop_unused_parameters(gm)
    gm.recompile()
