"""Attention in the step graph: without copies of shared KV heads, and fast for one query token."""

from typing import Any

import torch
from torch import Tensor
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


def use_one_token_attention(gm: GraphModule) -> None:
    """For a graph that is called with one token a row."""
    for node in gm.graph.nodes:
        if node.target is _SDPA:
            node.target, node.kwargs = one_token_attention, {"scale": node.kwargs.get("scale")}
    gm.recompile()


def one_token_attention(
    q_BH1D: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_B11S: Tensor, scale: float | None = None
) -> Tensor:
    """Attention of one query token a row over G KV heads, each serving H / G query heads. Returns [B, H, 1, D].

    The query heads of a KV head are its rows, so that each key is read once. With a single row of low precision
    torch's kernel spends most of its time rearranging the keys for a matrix product (4.4 times slower than the plain
    loops Inductor makes of this: 373 to 82 us for 6 heads of 64 over 576 slots, bf16, one thread).
    """
    rows_BGRD = q_BH1D.unflatten(1, (k_BGSD.shape[1], -1)).squeeze(3)
    if rows_BGRD.shape[2] > 1 or q_BH1D.dtype == torch.float32:
        out = torch.nn.functional.scaled_dot_product_attention(
            rows_BGRD, k_BGSD, v_BGSD, mask_B11S, scale=scale
        )
        return out.flatten(1, 2).unsqueeze(2)
    q_BGRD = rows_BGRD.float() * (scale if scale is not None else q_BH1D.shape[-1] ** -0.5)
    scores_BGRS = (q_BGRD.unsqueeze(3) * k_BGSD.float().unsqueeze(2)).sum(-1)
    if mask_B11S.dtype == torch.bool:
        scores_BGRS = scores_BGRS.masked_fill(~mask_B11S, -torch.inf)
    else:
        scores_BGRS = scores_BGRS + mask_B11S
    weights_BGRS = scores_BGRS.softmax(-1)
    out_BGRD = (weights_BGRS.unsqueeze(-1) * v_BGSD.float().unsqueeze(2)).sum(3)
    return out_BGRD.to(q_BH1D.dtype).flatten(1, 2).unsqueeze(2)
