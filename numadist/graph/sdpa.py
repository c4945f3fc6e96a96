"""Questions about attention in a graph: sdpa(query, key, value, attn_mask, dropout_p, is_causal)."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from numadist.graph import query
from numadist.graph.query import aten

SDPA = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class SdpaForm:
    """What kernels ask of attention. mask_dtype: None without a mask."""

    head_dim: int
    dtype: torch.dtype
    mask_dtype: torch.dtype | None


def mask(node: Node) -> Node | None:
    """The mask, if there is one."""
    found = query.argument(node, 3, "attn_mask")
    assert found is None or isinstance(found, Node)
    return found


def dropout(node: Node) -> float:
    return float(query.argument(node, 4, "dropout_p", 0.0))


def is_causal(node: Node) -> bool:
    return bool(query.argument(node, 5, "is_causal", False))


def mask_kind(node: Node) -> str:
    """What hides keys from queries: `causal`, `dense` (a tensor), or nothing: empty."""
    if mask(node) is not None:
        return "dense"
    return "causal" if is_causal(node) else ""


def form(node: Node) -> SdpaForm | None:
    """Of attention over [B, H, S, D] without dropout, of one dtype and head size; None of any other."""
    values = [query.value(query.operand(node, i)) for i in range(3)]
    hidden = mask(node)
    if any(v is None or v.dim() != 4 or v.dtype != values[0].dtype for v in values):
        return None
    head_dim, mask_value = values[0].shape[-1], None if hidden is None else query.value(hidden)
    if not isinstance(head_dim, int) or values[2].shape[-1] != head_dim or dropout(node):
        return None
    if hidden is not None and (mask_value is None or mask_value.dim() not in (2, 4)):
        return None
    return SdpaForm(head_dim, values[0].dtype, None if mask_value is None else mask_value.dtype)


def keys_before_repeat(node: Node) -> tuple[Node, Node] | None:
    """Key and value of attention before their heads were repeated, if both were and alike."""
    if node.target is not SDPA:
        return None
    key, value = (_before_repeat(query.operand(node, i)) for i in (1, 2))
    if key is None or value is None or query.shape(key)[1] != query.shape(value)[1]:
        return None
    return key, value


def _before_repeat(kv: Node) -> Node | None:
    """x [B, H, S, D] if kv is x with every head repeated: reshape(expand(unsqueeze(x, 2)))."""
    if kv.target is not aten.reshape.default or query.operand(kv, 0).target is not aten.expand.default:
        return None
    expanded = query.operand(kv, 0)
    unsqueezed = query.operand(expanded, 0)
    if unsqueezed.target is not aten.unsqueeze.default or unsqueezed.args[1] != 2:
        return None
    source = query.operand(unsqueezed, 0)
    copies, out = query.shape(expanded), query.shape(kv)
    heads = query.shape(source)[1]
    repeats_heads = len(out) == 4 and copies[1] == heads and out[1] == heads * copies[2]
    return source if repeats_heads else None
