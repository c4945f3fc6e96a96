"""`numadist.explain`: every decision of the compiler, on the graph's own lines."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from numadist.costmodel.profile import MachineProfile
from numadist.shard import graph
from numadist.shard.auto import choose_schema
from numadist.shard.blocks import build_schema
from numadist.shard.capture import as_args, capture
from numadist.shard.placement import Shard, cut_size
from numadist.shard.reduce import point_of, reduce_points
from numadist.shard.schema import Block, Schema


def explain(
    model: torch.nn.Module,
    example_inputs: Any,
    num_ranks: int | None = None,
    *,
    dynamic_shapes: Any = None,
    profile: MachineProfile | None = None,
) -> str:
    """How `model` would be sharded over `num_ranks` ranks: blocks, code with placements, bytes, all-reduces.

    num_ranks: default 2, with a profile one a node of that machine, at least 2.
    profile: show what ranks="auto", blocks="auto" would choose there of so many ranks, and what else was considered.

    Plans only: no weight is copied and no process group is needed. Raises: ShardError as numadist.shard does.
    """
    args, kwargs = as_args(example_inputs)
    gm = capture(model, args, kwargs, dynamic_shapes)
    if profile is None:
        return explain_graph(gm, build_schema(gm, num_ranks or 2))
    num_ranks = num_ranks or max(2, profile.nodes)
    counts = [n for n in range(num_ranks, 0, -1) if num_ranks % n == 0]
    return explain_graph(gm, choose_schema(gm, counts, profile, choose_blocks=True))


def explain_graph(gm: GraphModule, schema: Schema) -> str:
    """The same for a graph already captured, before it is rewritten for a rank."""
    nodes = {n.name: n for n in gm.graph.nodes}
    points = reduce_points(gm, {nodes[name] for name in schema.partial_values()})
    lines = [*_summary(gm, schema, points), *_cost_lines(schema), ""]
    described: dict[tuple, str] = {}
    for block in schema.blocks:
        shape = _signature(block, nodes)
        if shape in described:
            lines.append(f"{block.module}: {block.kind}, as {described[shape]}")
            continue
        described[shape] = block.module
        lines += _block_lines(block, nodes, points)
    if schema.left_alone:
        lines += ["", "replicated on every rank:"]
        lines += [f"  {entry.module} ({entry.node}): {entry.reason}" for entry in schema.left_alone]
    return "\n".join(lines)


def param_bytes(gm: GraphModule, schema: Schema, rank: int) -> int:
    """Bytes of parameters `rank` holds; tied names and unused parameters are not counted."""
    shards = schema.param_shards()
    used = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr" and n.users}
    seen: dict[int, int] = {}
    for name, param in gm.named_parameters(remove_duplicate=False):
        if name in used:
            local = shards.get(name, Shard({})).local_shape(param.shape, rank)
            seen[id(param)] = torch.Size(local).numel() * param.element_size()
    return sum(seen.values())


def _summary(gm: GraphModule, schema: Schema, points: list[Node]) -> list[str]:
    whole = param_bytes(gm, Schema(1, ""), 0)
    kinds: dict[str, int] = {}
    for block in schema.blocks:
        kinds[block.kind] = kinds.get(block.kind, 0) + 1
    counts = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "none"
    local = [param_bytes(gm, schema, rank) for rank in range(schema.num_ranks)]
    shares = ", ".join(f"r{r} {b / 1e6:.1f} MB ({b / whole:.0%})" for r, b in enumerate(local))
    sizes = sorted({_bytes_text(n) for n in points})
    return [
        f"{schema.num_ranks} ranks; sharded blocks: {counts}; whole model {whole / 1e6:.1f} MB",
        f"weights per rank: {shares}",
        f"all-reduces per forward: {len(points)}" + (f" of {', '.join(sizes)}" if points else ""),
    ]


def _cost_lines(schema: Schema) -> list[str]:
    """Of an automatic choice: every plan considered, and what each block costs."""
    if schema.costs is None:
        return []
    lines = [f"predicted for {schema.costs.profile}:"]
    for plan in schema.costs.candidates:
        what = f"{plan.num_ranks} ranks, {plan.num_blocks} blocks sharded"
        if plan.num_ranks == 1:
            what = "one rank with all cores"
        why = f"rejected: {plan.rejected}" if plan.rejected else "<- chosen"
        lines.append(f"  {what}: {plan.predicted_ms:.2f} ms  {why}")
    for block in schema.costs.blocks:
        lines.append(
            f"  {block.module} ({block.kind}): {block.sharded_ms:.3f} ms sharded, {block.whole_ms:.3f} ms whole"
            f"{'' if block.sharded else '  <- whole'}"
        )
    return lines


def _bytes_text(node: Node) -> str:
    val = graph.value(node)
    return f"{tuple(val.shape)} {str(val.dtype).removeprefix('torch.')}"


def _signature(block: Block, nodes: dict[str, Node]) -> tuple:
    """Equal for blocks that look alike: layer after layer of one model."""
    values = [(str(nodes[name.partition(".")[0]].target), repr(s)) for name, s in block.values.items()]
    return (block.kind, tuple(sorted(values)), tuple(repr(s) for s in block.params.values()))


def _block_lines(block: Block, nodes: dict[str, Node], points: list[Node]) -> list[str]:
    unit = f", cut on multiples of {block.units[-1]}" if block.units else ""
    lines = [f"{block.module}: {block.kind}{unit}"]
    lines += [f"  {name}: {_shard_text(shard)}" for name, shard in block.params.items()]
    lines += [f"  {name}: kept by rank 0, zero elsewhere" for name in block.partial_params]
    inside = {name.partition(".")[0] for name in block.values} | {block.sink, *block.slices}
    inside |= {*block.lookups, *block.heads}
    for node in nodes.values():
        if node.name in inside:
            lines.append(f"    {_code(node)}  # {_placement_text(node, block)}")
    for name in [block.sink, *block.lookups]:
        point = point_of(nodes[name], points) if name is not None else None
        if point is not None:
            lines.append(f"    all_reduce({point.name})  # {_bytes_text(point)}")
    return lines


def _placement_text(node: Node, block: Block) -> str:
    if node.name == block.sink:
        return "row-parallel -> partial"
    if node.name in block.lookups:
        return "rows of this rank, zeros for others -> partial"
    if node.name in block.heads:
        what = "logits of this rank's rows" if block.kind == "vocabulary" else "columns of this rank"
        return f"{what} -> gathered over the last dim"
    if node.name in block.slices:
        shard, users = block.slices[node.name]
        return f"replicated; {', '.join(users)} take {_shard_text(shard)}"
    role = "column-parallel -> " if node.name in block.columns else ""
    shards = [s for name, s in block.values.items() if name.partition(".")[0] == node.name]
    return role + "; ".join(dict.fromkeys(map(_shard_text, shards)))


def _shard_text(shard: Shard) -> str:
    parts = []
    for dim, s in shard.dims.items():
        cuts = " | ".join(",".join(f"{a}:{b}" for a, b in cut) or "-" for cut in s.cuts)
        sizes = "+".join(str(cut_size(cut)) for cut in s.cuts)
        parts.append(f"dim {dim} [{cuts}] ({sizes})")
    return ", ".join(parts) or "replicated"


def _code(node: Node) -> str:
    args = ", ".join(str(a) for a in node.args)
    op = getattr(node.target, "__name__", None) or str(node.target)
    return f"{node.name} = {op}({args})"
