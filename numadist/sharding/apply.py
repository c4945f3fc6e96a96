"""Rewrite a captured graph into one rank's graph, as the schema says."""

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from numadist.errors import ShardError
from numadist.graph import query
from numadist.graph.cleanup import drop_unused_parameters
from numadist.graph.query import aten
from numadist.sharding import rules
from numadist.sharding.build_schema import fingerprint
from numadist.sharding.collectives import Emit, Emitter
from numadist.sharding.placement import Shard
from numadist.sharding.reductions import reduce_points
from numadist.sharding.schema import GATHERED_OUTPUT, Block, Schema
from numadist.sharding.sequence import Region, outside_readers, region_of, sliced_inputs


def check_fits(gm: GraphModule, schema: Schema) -> None:
    """Raises: ShardError if the schema was made for another model."""
    found = fingerprint(gm)
    if schema.fingerprint != found:
        raise ShardError(
            f"the schema is for another model (its graph is {schema.fingerprint}, this one {found}): "
            "other config, example shapes or torch version; plan it again"
        )


def apply(gm: GraphModule, schema: Schema, rank: int, emit: Emitter) -> None:
    """Turn `gm` into the graph of `rank`, in place: local sizes, local slices, one reduction a partial value.

    Raises: ShardError if the schema splits tokens and `emit` cannot.
    """
    nodes = {n.name: n for n in gm.graph.nodes}
    points = reduce_points(gm, schema, train=emit.enter is not None)
    region = region_of(gm, schema)
    if region and emit.reduce_scatter is None:
        raise ShardError(
            "this schema is for sequence parallelism, which numadist.shard has for inference only; "
            "plan the model without it"
        )
    _slice_inputs(gm, region, schema.num_ranks, rank)
    gathered = _gather_shares(gm, region, rank, emit)
    for block in schema.blocks:
        entries = _insert_entries(gm, block, nodes, emit.enter) if emit.enter is not None else {}
        _enter_parameters(gm, block, emit)
        _localize_values(block, nodes, rank)
        _insert_slices(gm, block, {**nodes, **entries, **gathered}, rank)
        for name in block.lookups:
            nodes[name] = _split_lookup(gm, nodes[name], block, rank)
        for name in block.heads if emit.gather_heads or block.kind == GATHERED_OUTPUT else []:
            _gather_head(gm, nodes[name], block, rank, emit)
    for point in points:
        if point in region:
            _insert_reduce_scatter(gm, nodes[point.name], len(query.shape(point)), region[point], rank, emit)
        else:
            _insert_all_reduce(gm, nodes[point.name], emit)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    drop_unused_parameters(gm)
    gm.recompile()


def _insert_entries(gm: GraphModule, block: Block, nodes: dict[str, Node], enter: Emit) -> dict[str, Node]:
    """Route every replicated value that the block's sharded ops read through one `enter`; returns them by name."""
    sharded = {nodes[name.partition(".")[0]] for name in block.values}
    others = {nodes[name] for name in (block.sink, *block.heads) if name is not None}
    # In the graph's order: all ranks must make the collectives of the backward alike.
    members = [n for n in gm.graph.nodes if n in sharded or n in others]
    own = {*block.params, *block.partial_params}
    readers: dict[Node, list[Node]] = {}
    for member in members:
        for source in member.all_input_nodes:
            if source not in sharded and str(source.target) not in own and _carries_gradient(source):
                readers.setdefault(source, []).append(member)
    entries: dict[str, Node] = {}
    for source, users in readers.items():
        with gm.graph.inserting_after(source):
            entered = entries[source.name] = enter(gm.graph, source)
        for user in users:
            user.replace_input_with(source, entered)
    return entries


def _enter_parameters(gm: GraphModule, block: Block, emit: Emitter) -> None:
    """Route the block's own parameters through what gives them the whole gradient, for training."""
    for node in list(gm.graph.nodes):
        if node.op != "get_attr":
            continue
        entered, users = node, list(node.users)
        with gm.graph.inserting_after(node):
            if emit.enter_weight is not None and node.target in block.params:
                entered = emit.enter_weight(gm.graph, node, block.params[str(node.target)])
            elif emit.enter_bias is not None and node.target in block.partial_params:
                entered = emit.enter_bias(gm.graph, node)
        for user in users if entered is not node else []:
            user.replace_input_with(node, entered)


def _carries_gradient(node: Node) -> bool:
    val = query.value(node)
    return isinstance(val, torch.Tensor) and val.is_floating_point()


def _localize_values(block: Block, nodes: dict[str, Node], rank: int) -> None:
    """Replace the literal sizes of the block's ops by this rank's."""
    lists: dict[str, dict[int, Shard]] = {}
    for name, shard in block.values.items():
        head, _, piece = name.partition(".")
        if piece:
            lists.setdefault(head, {})[int(piece)] = shard
        elif nodes[name].target in rules.LOCALIZE and nodes[name].target is not operator.getitem:
            _rewrite(nodes[name], shard, rank)
    for head, shards in lists.items():
        if nodes[head].target in rules.LOCALIZE:
            _rewrite(nodes[head], shards, rank)


def _rewrite(node: Node, placement: rules.Placement, rank: int) -> None:
    node.target, node.args = rules.LOCALIZE[node.target](node, placement, rank)


def _insert_slices(gm: GraphModule, block: Block, nodes: dict[str, Node], rank: int) -> None:
    """Give the block's ops their part of values that every rank has whole."""
    for name, (shard, users) in block.slices.items():
        source = nodes[name]
        with gm.graph.inserting_after(source):
            part = source
            for dim, dim_shard in shard.dims.items():
                part = _take(gm, part, dim, dim_shard.cuts[rank])
        for user in users:
            nodes[user].replace_input_with(source, part)


def _take(gm: GraphModule, source: Node, dim: int, cut: tuple[tuple[int, int], ...]) -> Node:
    """`source` restricted to `cut` along `dim`, inserted right behind it."""
    with gm.graph.inserting_after(source):
        pieces: list[Node] = []
        for start, stop in reversed(cut or ((0, 0),)):
            pieces.insert(0, gm.graph.call_function(aten.slice.Tensor, (source, dim, start, stop)))
    if len(pieces) == 1:
        return pieces[0]
    with gm.graph.inserting_after(pieces[-1]):
        return gm.graph.call_function(aten.cat.default, (pieces, dim))


def _split_lookup(gm: GraphModule, node: Node, block: Block, rank: int) -> Node:
    """Embedding of this rank's rows; tokens of other ranks give zeros. Returns the partial value."""
    weight, tokens, rest = query.operand(node, 0), query.operand(node, 1), node.args[3:]
    rows = block.params[str(weight.target)].dims[0]
    ((start, stop),), size = rows.cuts[rank], rows.cuts[-1][0][1]
    g = gm.graph
    with g.inserting_before(node):
        row = g.call_function(aten.sub.Tensor, (tokens, start))
        before = _between(g, tokens, 0, start)
        behind = _between(g, tokens, stop, size)
        foreign = g.call_function(aten.logical_or.default, (before, behind))
        # A token that no rank has stays outside of this rank's rows too, and raises what torch raises.
        safe = g.call_function(aten.masked_fill.Scalar, (row, foreign, 0))
    padding = query.integer(node, 2, "padding_idx", -1)
    node.args = (weight, safe, padding - start if start <= padding < stop else -1, *rest)
    users = list(node.users)
    with g.inserting_before(node.next):
        mask = g.call_function(aten.unsqueeze.default, (foreign, -1))
        partial = g.call_function(aten.masked_fill.Scalar, (node, mask, 0.0))
    for user in users:
        user.replace_input_with(node, partial)
    return partial


def _between(g: Graph, tokens: Node, first: int, end: int) -> Node:
    above = g.call_function(aten.ge.Scalar, (tokens, first))
    below = g.call_function(aten.lt.Scalar, (tokens, end))
    return g.call_function(aten.logical_and.default, (above, below))


def _gather_head(gm: GraphModule, node: Node, block: Block, rank: int, emit: Emitter) -> None:
    """Outputs of all ranks' rows side by side. Chunks are equal but for the last one, which is padded on the way."""
    rows = block.params[str(query.operand(node, 1).target)].dims[0]
    num_ranks, chunk, size = len(rows.cuts), rows.local_size(0), rows.cuts[-1][0][1]
    g, users = gm.graph, list(node.users)
    with g.inserting_before(node.next):
        x = node
        if rows.local_size(rank) < chunk:
            x = g.call_function(aten.constant_pad_nd.default, (x, [0, chunk - rows.local_size(rank)]))
        x = emit.all_gather(g, x)  # [ranks * d0, ..., chunk]
        x = g.call_function(aten.unflatten.int, (x, 0, [num_ranks, -1]))
        x = g.call_function(aten.movedim.int, (x, 0, -2))  # [d0, ..., ranks, chunk]
        x = g.call_function(aten.flatten.using_ints, (x, -2, -1))
        x = g.call_function(aten.slice.Tensor, (x, -1, 0, size))
    for user in users:
        user.replace_input_with(node, x)


def _insert_all_reduce(gm: GraphModule, node: Node, emit: Emitter) -> None:
    users = list(node.users)
    with gm.graph.inserting_before(node.next):
        total = emit.all_reduce(gm.graph, node)
    for user in users:
        user.replace_input_with(node, total)


def _slice_inputs(gm: GraphModule, region: Region, num_ranks: int, rank: int) -> None:
    """Give the ops of a region their share of values that every rank has whole."""
    for node in region:
        for source, shard in sliced_inputs(node, region, num_ranks).items():
            ((dim, tokens),) = shard.dims.items()
            ((start, stop),) = tokens.cuts[rank]
            with gm.graph.inserting_before(node):
                part = gm.graph.call_function(aten.slice.Tensor, (source, dim, start, stop))
            node.replace_input_with(source, part)


def _gather_shares(gm: GraphModule, region: Region, rank: int, emit: Emitter) -> dict[str, Node]:
    """Give readers outside of a region all tokens; returns the gathered values by name."""
    gathered: dict[str, Node] = {}
    for node, shard in region.items():
        readers = outside_readers(node, region)
        if not readers:
            continue
        ((dim, tokens),) = shard.dims.items()
        chunk, size = tokens.local_size(0), tokens.cuts[-1][0][1]
        g, ndim = gm.graph, len(query.shape(node)) - dim
        with g.inserting_before(node.next):
            x = _tokens_first(g, node, dim)
            x = _padded(g, x, ndim, chunk - tokens.local_size(rank))
            x = emit.all_gather(g, x)
            if chunk * len(tokens.cuts) > size:
                x = g.call_function(aten.slice.Tensor, (x, 0, 0, size))
            x = _tokens_back(g, x, dim)
        x.meta = {**node.meta, "val": query.value(node).contiguous()}  # for rewrites that ask for sizes
        for reader in readers:
            reader.replace_input_with(node, x)
        gathered[node.name] = x
    return gathered


def _insert_reduce_scatter(
    gm: GraphModule, node: Node, ndim: int, shard: Shard, rank: int, emit: Emitter
) -> None:
    assert emit.reduce_scatter is not None
    ((dim, tokens),) = shard.dims.items()
    chunk, local, size = tokens.local_size(0), tokens.local_size(rank), tokens.cuts[-1][0][1]
    g, users = gm.graph, list(node.users)
    with g.inserting_before(node.next):
        x = _tokens_first(g, node, dim)
        x = _padded(g, x, ndim - dim, chunk * len(tokens.cuts) - size)
        x = emit.reduce_scatter(g, x)
        if local < chunk:
            x = g.call_function(aten.slice.Tensor, (x, 0, 0, local))
        x = _tokens_back(g, x, dim)
    for user in users:
        user.replace_input_with(node, x)


def _tokens_first(g: Graph, x: Node, dim: int) -> Node:
    """x [1, ..., tokens, ...] -> [tokens, ...]: collectives are along dim 0."""
    for _ in range(dim):
        x = g.call_function(aten.squeeze.dim, (x, 0))
    return x


def _tokens_back(g: Graph, x: Node, dim: int) -> Node:
    for _ in range(dim):
        x = g.call_function(aten.unsqueeze.default, (x, 0))
    return x


def _padded(g: Graph, x: Node, ndim: int, num_rows: int) -> Node:
    """x with rows of zeros behind: all ranks' chunks must be of one size."""
    if not num_rows:
        return x
    return g.call_function(aten.constant_pad_nd.default, (x, [0, 0] * (ndim - 1) + [0, num_rows]))
