"""Attention in a graph for inference: KV heads are not repeated, and our kernel where it is the faster one."""

import torch
from torch.fx import GraphModule, Node

from numadist.graph import query, sdpa
from numadist.kernels import attention as kernel


def use_grouped_attention(gm: GraphModule) -> None:
    """Attention over KV heads repeated for their query heads takes the heads as they are (`enable_gqa`).

    Hugging Face repeats them whenever there is a mask: in generation, a copy of the whole cache at every step.
    """
    for node in gm.graph.nodes:
        sources = sdpa.keys_before_repeat(node)
        if sources is not None:
            node.args = (node.args[0], *sources, *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}


def write_attention(gm: GraphModule) -> None:
    """Attention that `numadist::attention` takes becomes that, on CPUs where it is faster; inference only."""
    for node in list(gm.graph.nodes):
        if node.target is not sdpa.SDPA or (form := sdpa.form(node)) is None:
            continue
        if kernel.pays(form.head_dim, form.dtype, form.mask_dtype, sdpa.mask_kind(node) == "causal"):
            _write_ours(gm, node)


def write_attention_of_one_query(gm: GraphModule) -> None:
    """The same for a graph that is called with one query a head."""
    for node in list(gm.graph.nodes):
        if node.target is not sdpa.SDPA or (form := sdpa.form(node)) is None:
            continue
        if kernel.takes(form.head_dim, form.dtype, form.mask_dtype):
            _write_ours(gm, node)


def _write_ours(gm: GraphModule, node: Node) -> None:
    q, key, value = (query.operand(node, i) for i in range(3))
    scale = node.kwargs.get("scale") or query.shape(q)[-1] ** -0.5
    if not node.kwargs.get("enable_gqa"):
        key, value = sdpa.keys_before_repeat(node) or (key, value)
    with gm.graph.inserting_before(node):
        ours = gm.graph.call_function(
            torch.ops.numadist.attention.default,
            (q, key, value, sdpa.mask(node), sdpa.is_causal(node), scale),
        )
    ours.meta.update(node.meta)
    node.replace_all_uses_with(ours)
    gm.graph.erase_node(node)  # dead code elimination keeps it: it could draw dropout
