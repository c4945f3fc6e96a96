"""Attention in a graph for inference: KV heads are not repeated, and our kernel where it is the faster one."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.kernels import attention as kernel
from numadist.shard import graph
from numadist.shard.graph import aten

_SDPA = aten.scaled_dot_product_attention.default
_MASK, _DROPOUT, _IS_CAUSAL = 3, 4, 5  # its positional arguments after query, key, value


def use_grouped_attention(gm: GraphModule) -> None:
    """Attention over KV heads repeated for their query heads takes the heads as they are (`enable_gqa`).

    Hugging Face repeats them whenever there is a mask: in generation, a copy of the whole cache at every step.
    """
    for node in gm.graph.nodes:
        if node.target is not _SDPA:
            continue
        sources = _before_repeat(node)
        if sources is not None:
            node.args = (node.args[0], *sources, *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}
    gm.graph.eliminate_dead_code()
    gm.recompile()


def write_attention(gm: GraphModule, one_query: bool = False) -> None:
    """Attention that `numadist::attention` takes becomes that, on CPUs where it is faster; inference only.

    one_query: the graph is called with one query a head.
    """
    for node in list(gm.graph.nodes):
        if node.target is not _SDPA or not _pays(node, one_query):
            continue
        query, key, value = node.args[:3]
        scale = node.kwargs.get("scale") or graph.shape(query)[-1] ** -0.5
        if not node.kwargs.get("enable_gqa"):
            key, value = _before_repeat(node) or (key, value)
        with gm.graph.inserting_before(node):
            ours = gm.graph.call_function(
                torch.ops.numadist.attention.default,
                (query, key, value, _argument(node, _MASK, None), _argument(node, _IS_CAUSAL, False), scale),
            )
        ours.meta.update(node.meta)
        node.replace_all_uses_with(ours)
        gm.graph.erase_node(node)  # dead code elimination keeps it: it could draw dropout
    gm.graph.eliminate_dead_code()
    gm.recompile()


def mask_of(node: Node) -> str:
    """What hides keys from queries: `causal`, `dense` (a tensor), or nothing: empty."""
    if _argument(node, _MASK, None) is not None:
        return "dense"
    return "causal" if _argument(node, _IS_CAUSAL, False) else ""


def fits_ours(node: Node) -> bool:
    """Whether `numadist::attention` computes this attention, on CPUs that have it."""
    form = _form(node)
    return form is not None and kernel.fits(*form)


def _pays(node: Node, one_query: bool) -> bool:
    form = _form(node)
    if one_query:
        return form is not None and kernel.takes_one(*form)
    return form is not None and kernel.pays(*form, mask_of(node) == "causal")


def _form(node: Node) -> tuple[int, torch.dtype, torch.dtype | None] | None:
    """(head dim, dtype, dtype of the mask) of attention in a form that we rewrite; None in any other."""
    values = [graph.value(n) for n in node.args[:3]]
    mask = _argument(node, _MASK, None)
    if any(v is None or v.dim() != 4 or v.dtype != values[0].dtype for v in values):
        return None
    head_dim, mask_value = values[0].shape[-1], None if mask is None else graph.value(mask)
    if not isinstance(head_dim, int) or values[2].shape[-1] != head_dim or _argument(node, _DROPOUT, 0.0):
        return None
    if mask is not None and (mask_value is None or mask_value.dim() not in (2, 4)):
        return None
    return head_dim, values[0].dtype, None if mask is None else mask_value.dtype


def _argument(node: Node, place: int, default: Any) -> Any:
    name = {_MASK: "attn_mask", _DROPOUT: "dropout_p", _IS_CAUSAL: "is_causal"}[place]
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _before_repeat(sdpa: Node) -> tuple[Node, Node] | None:
    """Key and value before their heads were repeated, if both were and alike."""
    key, value = (_repeated(kv) for kv in sdpa.args[1:3])
    if key is None or value is None or graph.shape(key)[1] != graph.shape(value)[1]:
        return None
    return key, value


def _repeated(kv: Any) -> Node | None:
    """x [B, H, S, D] if kv is x with every head repeated: reshape(expand(unsqueeze(x, 2)))."""
    if kv.target is not aten.reshape.default or kv.args[0].target is not aten.expand.default:
        return None
    unsqueezed: Any = kv.args[0].args[0]
    if unsqueezed.target is not aten.unsqueeze.default or unsqueezed.args[1] != 2:
        return None
    source = unsqueezed.args[0]
    expanded, out = graph.shape(kv.args[0]), graph.shape(kv)
    heads = graph.shape(source)[1]
    repeats_heads = len(out) == 4 and expanded[1] == heads and out[1] == heads * expanded[2]
    return source if repeats_heads else None
