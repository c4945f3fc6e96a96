"""`numadist.explain`: every decision of the compiler, on the graph's own lines."""

import math
import operator
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from numadist.costmodel.profile import MachineProfile
from numadist.graph import query
from numadist.pipeline.plan import codes_for, default_ranks, plan_captured
from numadist.pipeline.quantize import Quantization
from numadist.pipeline.stages import capture
from numadist.sharding.apply import check_fits
from numadist.sharding.placement import Shard, cut_size
from numadist.sharding.reductions import point_of, reduce_points
from numadist.sharding.schema import Block, LeftAlone, Schema
from numadist.sharding.sequence import Region, outside_readers, plan_sequence, region_of


def explain(
    what: Schema | torch.nn.Module,
    example_inputs: Any = None,
    num_ranks: int | None = None,
    *,
    schema: Schema | None = None,
    ranks: int | Literal["auto"] | None = None,
    blocks: Literal["auto"] | None = None,
    profile: MachineProfile | None = None,
    sequence_parallel: bool = False,
    dynamic_shapes: Any = None,
    weights: str | Path | None = None,
    quantization: Quantization | None = None,
) -> str:
    """How a model is sharded: blocks, code with placements, bytes, all-reduces, and what was rejected.

    what: a schema of `numadist.plan`, or a model, which is planned first: the other arguments are those of plan.
    num_ranks: of the group to plan for, default 2, or one a node of `profile`, at least 2.
    schema: of a model, decisions to explain instead of planning, e.g. a loaded and edited file.
    A schema from a file alone has no graph: its blocks are listed without code.
    Plans only: no weight is copied and no process group is needed. Raises: ShardError as numadist.plan does.
    """
    if isinstance(what, Schema):
        return explain_schema(what) if what.graph is None else explain_graph(what.graph, what)
    captured = capture(what, example_inputs, dynamic_shapes)
    if schema is None:
        codes = codes_for(captured, what, weights, quantization)
        num_ranks = num_ranks or default_ranks(profile)
        schema = plan_captured(captured, num_ranks, ranks, blocks, profile, [], codes)
        if sequence_parallel:
            schema = replace(schema, sequence=plan_sequence(captured.gm, schema))
    check_fits(captured.gm, schema)
    return explain_graph(captured.gm, schema)


def explain_schema(schema: Schema) -> str:
    """What a schema says without its graph."""
    lines = [f"{schema.num_ranks} ranks; {len(schema.blocks)} blocks sharded"]
    lines += [*_codes_lines(schema), *_cost_lines(schema), ""]
    for block in schema.blocks:
        lines += [f"{block.module}: {block.kind}", *_parameter_lines(block, schema)]
    if schema.left_alone:
        lines += ["", "replicated on every rank:", *_entry_lines(schema.left_alone)]
    return "\n".join(lines)


def explain_graph(gm: GraphModule, schema: Schema) -> str:
    """The same for a graph already captured, before it is rewritten for a rank."""
    nodes = {n.name: n for n in gm.graph.nodes}
    points = reduce_points(gm, schema)
    region = region_of(gm, schema)
    lines = [*_summary(gm, schema), *_collective_lines(schema, points, region), *_cost_lines(schema), ""]
    described: dict[tuple[Any, ...], str] = {}
    for block in schema.blocks:
        shape = _signature(block, schema, nodes, points, region)
        if shape in described:
            lines.append(f"{block.module}: {block.kind}, as {described[shape]}")
            continue
        described[shape] = block.module
        lines += _block_lines(block, schema, nodes, points, region)
    lines += _region_lines(points, region)
    if schema.sequence is not None and schema.sequence.all_reduced:
        lines += ["", "all tokens on every rank:"]
        lines += _entry_lines(schema.sequence.all_reduced)
    if schema.left_alone:
        lines += ["", "replicated on every rank:"]
        lines += _entry_lines(schema.left_alone)
    return "\n".join(lines)


def param_bytes(gm: GraphModule, schema: Schema, rank: int) -> int:
    """Bytes of parameters `rank` holds, of codes where the schema is for such.

    Tied names and unused parameters are not counted.
    """
    shards = schema.param_shards()
    used = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr" and n.users}
    seen: dict[int, int] = {}
    for name, param in gm.named_parameters(remove_duplicate=False):
        if name in used:
            local = shards.get(name, Shard({})).local_shape(param.shape, rank)
            codes = schema.codes.get(name)
            width = param.element_size() if codes is None else codes.bytes_per_weight
            seen[id(param)] = round(torch.Size(local).numel() * width)
    return sum(seen.values())


def _summary(gm: GraphModule, schema: Schema) -> list[str]:
    whole = param_bytes(gm, Schema(1, "", codes=schema.codes), 0)
    kinds: dict[str, int] = {}
    for block in schema.blocks:
        kinds[block.kind] = kinds.get(block.kind, 0) + 1
    counts = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "none"
    local = [param_bytes(gm, schema, rank) for rank in range(schema.num_ranks)]
    shares = ", ".join(f"r{r} {b / 1e6:.1f} MB ({b / whole:.0%})" for r, b in enumerate(local))
    return [
        f"{schema.num_ranks} ranks; sharded blocks: {counts}; whole model {whole / 1e6:.1f} MB",
        f"weights per rank: {shares}",
        *_codes_lines(schema),
    ]


def _codes_lines(schema: Schema) -> list[str]:
    """What weights are kept as, if it is no plain numbers."""
    kinds = Counter(codes.layout for codes in schema.codes.values())
    return [f"weights that are codes: {'; '.join(f'{n} x {kind}' for kind, n in kinds.items())}"] * bool(
        kinds
    )


def _collective_lines(schema: Schema, points: list[Node], region: Region) -> list[str]:
    reduced = [p for p in points if p not in region]
    lines = [f"all-reduces per forward: {_counted(reduced)}"]
    if schema.sequence is not None:
        scattered = [p for p in points if p in region]
        gathered = [n for n in region if outside_readers(n, region)]
        lines.append(f"reduce-scatters per forward: {_counted(scattered)}{_total(scattered)}")
        lines.append(f"all-gathers per forward: {_counted(gathered)}{_total(gathered)}")
    return lines


def _counted(nodes: list[Node]) -> str:
    sizes = sorted({_bytes_text(n) for n in nodes})
    return f"{len(nodes)}" + (f" of {', '.join(sizes)}" if nodes else "")


def _total(nodes: list[Node]) -> str:
    """Bytes of the whole tensors, which are what the ranks exchange together."""
    num_bytes = sum(math.prod(map(query.hint, query.shape(n))) * query.value(n).dtype.itemsize for n in nodes)
    return f", {num_bytes / 1e6:.2f} MB in all" if nodes else ""


def _region_lines(points: list[Node], region: Region) -> list[str]:
    """What a rank computes for its own tokens, from one reduce-scatter to the next; what repeats is named only."""
    lines: list[str] = []
    seen: dict[tuple[str, ...], str] = {}
    parts: list[list[Node]] = []
    for node in region:
        if node in points:
            parts.append([])
        parts[-1].append(node)
    for first, *rest in parts:
        ops = (_region_text(first, region), *(f"{query.op_name(n)} {_region_text(n, region)}" for n in rest))
        if ops in seen:
            lines.append(f"own tokens after {first.name}: as after {seen[ops]}")
            continue
        seen[ops] = first.name
        lines.append(f"own tokens after {first.name}: {_shard_text(region[first])}")
        lines += [f"    {_code(node)}  # {_region_text(node, region)}" for node in rest]
    return lines


def _region_text(node: Node, region: Region) -> str:
    gathered = " -> gathered" if outside_readers(node, region) else ""
    return _shard_text(region[node]) + gathered


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
    val = query.value(node)
    return f"{tuple(val.shape)} {str(val.dtype).removeprefix('torch.')}"


def _signature(
    block: Block, schema: Schema, nodes: dict[str, Node], points: list[Node], region: Region
) -> tuple[Any, ...]:
    """Equal for blocks that look alike: layer after layer of one model."""
    values = [(str(nodes[name.partition(".")[0]].target), repr(s)) for name, s in block.values.items()]
    scattered = any(point in region for point in _reductions(block, nodes, points))
    params = tuple((repr(s), repr(schema.codes.get(name))) for name, s in block.params.items())
    return (block.kind, tuple(sorted(values)), params, scattered)


def _block_lines(
    block: Block, schema: Schema, nodes: dict[str, Node], points: list[Node], region: Region
) -> list[str]:
    unit = f", cut on multiples of {block.units[-1]}" if block.units else ""
    lines = [f"{block.module}: {block.kind}{unit}", *_parameter_lines(block, schema)]
    inside = {name.partition(".")[0] for name in block.values} | {block.sink, *block.slices}
    inside |= {*block.lookups, *block.heads}
    for node in nodes.values():
        if node.name in inside and (node.target is not operator.getitem or node.name in block.slices):
            lines.append(f"    {_code(node)}  # {_placement_text(node, block)}")
    for point in _reductions(block, nodes, points):
        collective = "reduce_scatter" if point in region else "all_reduce"
        lines.append(f"    {collective}({point.name})  # {_bytes_text(point)}")
    return lines


def _parameter_lines(block: Block, schema: Schema) -> list[str]:
    lines = []
    for name, shard in block.params.items():
        kept = f"; {schema.codes[name].layout}" if name in schema.codes else ""
        lines.append(f"  {name}: {_shard_text(shard)}{kept}")
    return lines + [f"  {name}: kept by rank 0, zero elsewhere" for name in block.partial_params]


def _entry_lines(entries: list[LeftAlone]) -> list[str]:
    return [f"  {entry.module} ({entry.node}): {entry.reason}" for entry in entries]


def _reductions(block: Block, nodes: dict[str, Node], points: list[Node]) -> list[Node]:
    """Where the sums of the block are taken, each time it is named."""
    sinks = [nodes[name] for name in (block.sink, *block.lookups) if name is not None]
    return [point for sink in sinks if (point := point_of(sink, points)) is not None]


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
    args = ", ".join(map(_argument, node.args))
    op = getattr(node.target, "__name__", None) or str(node.target)
    return f"{node.name} = {op}({args})"


def _argument(value: Any) -> str:
    """An output of several is named where it is used, and has no line of its own."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, Node) and value.target is operator.getitem:
        return f"{value.args[0]}[{value.args[1]}]"
    return str(value)
