"""From a plan (graph nodes) to a schema (names): labels for people, placements for machines."""

import hashlib
import operator

from torch.fx import GraphModule, Node

from numadist.graph import query
from numadist.graph.capture import CapturedModel
from numadist.graph.query import aten
from numadist.sharding import propagate
from numadist.sharding.placement import Shard
from numadist.sharding.schema import Block, LeftAlone, Schema
from numadist.sharding.vocabulary import RowSplit

_ATTENTION_OPS = {aten.scaled_dot_product_attention.default, aten.softmax.int, aten._softmax.default}
# (normalised) contractions between activations are attention too, in models that spell it out
_PRODUCT_OPS = {aten.matmul.default, aten.bmm.default}


def fingerprint(gm: GraphModule) -> str:
    """Identity of an exported graph: its ops, wiring and parameter shapes."""
    digest = hashlib.blake2b(digest_size=12)
    for node in gm.graph.nodes:
        digest.update(f"{node.name}|{node.op}|{node.target}|{node.args}|{node.kwargs}\n".encode())
    for name, param in gm.named_parameters():
        digest.update(f"{name}|{tuple(param.shape)}\n".encode())
    return digest.hexdigest()


def build_schema(captured: CapturedModel, num_ranks: int) -> Schema:
    """Plan the graph for `num_ranks` ranks and write the decisions down."""
    plan = propagate.plan(captured.gm, num_ranks, captured.state_inputs)
    return Schema(
        num_ranks=num_ranks,
        fingerprint=fingerprint(captured.gm),
        blocks=[*map(_describe, plan.blocks), *map(_describe_row_split, plan.row_splits)],
        left_alone=[_describe_left_alone(entry) for entry in plan.left_alone],
    )


def _describe(block: propagate.BlockPlan) -> Block:
    parameters = set(block.params)
    values: dict[str, Shard] = {}
    for node, placement in sorted(block.values.items(), key=lambda item: item[0].name):
        if isinstance(placement, dict):
            values |= {f"{node.name}.{i}": shard for i, shard in sorted(placement.items())}
        elif str(node.target) not in parameters:
            values[node.name] = placement
    bias = block.sink.bias
    return Block(
        kind=_kind(block),
        module=_common_module([*block.columns, block.sink.node]),
        sink=block.sink.node.name,
        columns=[n.name for n in sorted(block.columns, key=lambda n: n.name)],
        units=list(block.units),
        params=dict(sorted(block.params.items())),
        partial_params=[str(bias.target)] if bias is not None else [],
        values=values,
        slices={n.name: (shard, [u.name for u in users]) for n, (shard, users) in block.slices.items()},
    )


def _describe_row_split(plan: RowSplit) -> Block:
    return Block(
        kind=plan.kind,
        module=", ".join(dict.fromkeys(query.module_path(n) for n in (*plan.lookups, *plan.heads))),
        sink=None,
        columns=[],
        units=[],
        params=plan.params,
        partial_params=[],
        values={},
        slices={},
        lookups=[n.name for n in plan.lookups],
        heads=[n.name for n in plan.heads],
    )


def _kind(block: propagate.BlockPlan) -> str:
    ops = {n.target for n in block.values if n not in block.columns}
    if ops & _ATTENTION_OPS or ops & _PRODUCT_OPS:
        return "attention"
    if block.sink.num_experts > 1:
        return "experts"
    gates = [n for n in block.values if n.target is aten.mul.Tensor and _joins_columns(n, block)]
    return "gated mlp" if gates else "mlp"


def _joins_columns(node: Node, block: propagate.BlockPlan) -> bool:
    """A product of two values that come from different column-parallel layers (or halves of one)."""
    sources = []
    for operand in node.args:
        origin: set[Node] = set()
        todo = [operand] if isinstance(operand, Node) else []
        while todo:
            n = todo.pop()
            if n in block.columns or n.target is operator.getitem:
                origin.add(n)
            elif n in block.values:
                todo += n.all_input_nodes
        sources.append(origin)
    return len(sources) == 2 and all(sources) and not (sources[0] & sources[1])


def _common_module(nodes: list[Node]) -> str:
    paths = [query.module_path(n).split(".") for n in nodes]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or "(model)"


def _describe_left_alone(entry: propagate.LeftAlone) -> LeftAlone:
    where = query.module_path(entry.blamed) or "(model)"
    at = "" if entry.blamed is entry.node else f" (at {query.op_name(entry.blamed)} in {where})"
    return LeftAlone(query.module_path(entry.node) or "(model)", entry.node.name, entry.reason + at)
