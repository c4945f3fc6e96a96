"""Facts about graphs that passes need and leave (passes.py). Each tells where it does not hold."""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from numadist.graph import canonical, query
from numadist.graph.cleanup import is_noise
from numadist.graph.functionalize import writes_into_fresh_tensor
from numadist.graph.grad_modes import is_region
from numadist.graph.passes import Check, Fact
from numadist.graph.sdpa import keys_before_repeat
from numadist.graph.simplify import gelu_input


def _nowhere(found: Callable[[Node], object], what: str) -> Check:
    def violation(gm: GraphModule) -> str:
        return next((f"{node.name}: {what}" for node in gm.graph.nodes if found(node)), "")

    return violation


def _has_no_value(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.users) and query.value(node) is None


def _order(gm: GraphModule) -> str:
    names = [node.name for node in gm.graph.nodes]
    ordered = canonical.canonical_names(gm)
    return next((f"{a} stands where {b} belongs" for a, b in zip(names, ordered, strict=True) if a != b), "")


def _is_guard(node: Node) -> bool:
    return node.op == "call_module" and node.target == "_guards_fn"


SIZED = Fact("the value of every op is known", _nowhere(_has_no_value, "no value in its meta"))
NO_NOISE = Fact("no assertions on metadata, no casts that change nothing", _nowhere(is_noise, "noise"))
FUNCTIONAL = Fact(
    "no writes into fresh tensors", _nowhere(writes_into_fresh_tensor, "a write that is a value")
)
NO_SPELLED_GELU = Fact("GELU is one op", _nowhere(gelu_input, "GELU spelled out"))
CANONICAL = Fact("one order and one naming", _order)
ANY_SHAPE = Fact("inputs of other sizes are not refused", _nowhere(_is_guard, "a guard of whole shapes"))
NO_REGIONS = Fact("no region has a gradient mode of its own", _nowhere(is_region, "a region"))
KV_NOT_REPEATED = Fact(
    "attention takes KV heads as they are", _nowhere(keys_before_repeat, "KV heads are repeated")
)
