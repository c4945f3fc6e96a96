"""What training and evaluation mode changes in a graph, and which of its ops draw random numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.query import aten
from numadist.graph.sdpa import SDPA, dropout


@dataclass(frozen=True)
class _ModeArgument:
    """The argument that the mode decides: its place, name, and what it is in evaluation."""

    place: int
    name: str
    in_eval: Any


_BY_MODE = {
    aten.dropout.default: _ModeArgument(2, "train", False),
    aten.feature_dropout.default: _ModeArgument(2, "train", False),
    aten.alpha_dropout.default: _ModeArgument(2, "train", False),
    aten.batch_norm.default: _ModeArgument(5, "training", False),
    SDPA: _ModeArgument(4, "dropout_p", 0.0),
}


def draws_numbers(node: Node) -> bool:
    """The node's result depends on the random generator."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    if op is SDPA:
        return dropout(node) > 0
    known = _BY_MODE.get(op)
    if known is None:
        return True
    return bool(query.argument(node, known.place, known.name)) and query.argument(node, 1, "p") != 0


def graph_draws_numbers(gm: GraphModule) -> bool:
    return any(draws_numbers(node) for node in gm.graph.nodes)


def follows_mode(node: Node) -> bool:
    """The node is another one in the other mode."""
    if node.target is SDPA:
        return dropout(node) > 0
    return node.target in _BY_MODE and query.argument(node, 1, "p") != 0


def switcher(gm: GraphModule) -> Callable[[bool], None]:
    """A function that puts a graph captured in training mode into evaluation mode, and back."""
    trained = {node: node.args for node in gm.graph.nodes if follows_mode(node)}

    def switch(training: bool) -> None:
        for node, args in trained.items():
            node.args = args if training else _evaluated(node, args)
        gm.recompile()

    return switch


def _evaluated(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    known = _BY_MODE[node.target]  # type: ignore[index]
    assert len(args) > known.place, f"{node.name}: {known.name} is not among its positional arguments"
    return (*args[: known.place], known.in_eval, *args[known.place + 1 :])
