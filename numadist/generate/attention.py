"""Attention in the step graph: without copies of shared KV heads, and fast for one query token."""

from typing import Any

from torch.fx import GraphModule, Node

from numadist.shard import graph
from numadist.shard.graph import aten

_SDPA = aten.scaled_dot_product_attention.default


def use_grouped_attention(gm: GraphModule) -> None:
    """Attention over KV heads repeated for their query heads takes the heads as they are (`enable_gqa`).

    Hugging Face repeats them whenever there is a mask: a copy of the whole cache at every step.
    """
    for node in gm.graph.nodes:
        if node.target is not _SDPA:
            continue
        sources = [_before_repeat(kv) for kv in node.args[1:3]]
        if all(sources) and graph.shape(sources[0])[1] == graph.shape(sources[1])[1]:
            node.args = (node.args[0], *sources, *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _before_repeat(kv: Any) -> Node | None:
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
