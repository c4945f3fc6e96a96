"""Sequence parallelism: what lies between two blocks is computed by each rank for its own tokens.

Without it a partial sum is all-reduced, and every rank then adds the residual and normalizes all tokens. With it the
sum is reduce-scattered, ops that treat each token alone run on this rank's share, and a share is gathered where an op
needs all tokens: a column-parallel layer, a slice along the sequence, the model's output.

Which ops treat tokens alone is what the sharding rules say: an op takes part if its rule, given a share of the output,
needs just the shares that are there. Its replicated inputs are sliced.
Source: arXiv 2205.05198. Differs: found on the graph; tokens are the first dim longer than one (sequences of a batch,
or positions of one sequence), so that shares are contiguous and no collective needs a transposed copy.
"""

from collections.abc import Collection, Iterable

import torch
from torch.fx import GraphModule, Node

from numadist.errors import ShardError
from numadist.graph import query
from numadist.graph.query import aten
from numadist.sharding import rules
from numadist.sharding.placement import CannotShard, NeedsUnit, Shard, equal_chunks
from numadist.sharding.reductions import reduce_points
from numadist.sharding.schema import LeftAlone, Schema, Sequence

Region = dict[Node, Shard]  # values of which a rank has its own tokens, in graph order

# Rules of ops without literal sizes that may treat the tokens alone; the rule itself says whether they do.
_ROW_WISE = {
    rules.pointwise,
    rules.identity,
    rules.dropout,
    rules.norm,
    rules.reduction,
    rules.along_one_dim,
    rules.slice_,
}


def plan_sequence(gm: GraphModule, schema: Schema) -> Sequence:
    """Which sums can be reduce-scattered under the schema's blocks, and what follows on the shares."""
    points = reduce_points(gm, schema)
    left = {}
    for point in points:
        reason = _why_not(point, schema.num_ranks)
        if reason is not None:
            left[point] = reason
    while True:
        region = _grow(gm, schema, [p for p in points if p not in left])
        # A sum that is gathered at once is better all-reduced, and that may stop what follows from being split.
        whole = {p: readers[0] for p in points if p in region and (readers := outside_readers(p, region))}
        if not whole:
            break
        for point, reader in whole.items():
            left[point] = f"{query.op_name(reader)} needs all its tokens"
    return Sequence(
        {node.name: shard for node, shard in region.items()},
        [LeftAlone(query.module_path(p) or "(model)", p.name, reason) for p, reason in left.items()],
    )


def region_of(gm: GraphModule, schema: Schema) -> Region:
    """The schema's token-split values on a graph not yet rewritten. Empty if it has none.

    Placements are found again, so that a value removed from the schema is computed whole, and what depends on it too.
    Raises: ShardError if the schema says other placements.
    """
    if schema.sequence is None:
        return {}
    wanted = schema.sequence.values
    points = [
        p for p in reduce_points(gm, schema) if p.name in wanted and _why_not(p, schema.num_ranks) is None
    ]
    region = _grow(gm, schema, points, wanted)
    for node, shard in region.items():
        if wanted[node.name] != shard:
            raise ShardError(
                f"the schema gives ranks {wanted[node.name]} of {node.name}; only {shard} is possible. "
                "Edit a sequence by removing values, or plan it again"
            )
    return region


def sliced_inputs(node: Node, region: Region, num_ranks: int) -> dict[Node, Shard]:
    """Inputs of a node of the region that every rank has whole -> the part of them it reads."""
    if not any(source in region for source in node.all_input_nodes):
        return {}  # where a partial sum is scattered
    inputs = _inputs_of(node, region[node], num_ranks)
    return {source: part for source, part in inputs.items() if source not in region}


def outside_readers(node: Node, region: Region) -> list[Node]:
    """Who needs all tokens of a node of the region. The size of another dim can be asked of a share."""
    return [u for u in node.users if u not in region and u.target is not aten.sym_size.int]


def _why_not(point: Node, num_ranks: int) -> str | None:
    """The reason why a sum's tokens cannot be split; None if they can."""
    dim = _token_dim(point)
    sizes = query.shape(point)
    if dim is None:
        return "it has one token"
    if not query.is_static(sizes[dim]):
        return f"its number of tokens is dynamic (dim {dim} of {tuple(sizes)})"
    if equal_chunks(sizes[dim], num_ranks) is None:
        return f"{sizes[dim]} tokens (dim {dim}) cannot be split over {num_ranks} ranks"
    return None


def _token_dim(point: Node) -> int | None:
    return _first_long_dim(query.shape(point)[:-1])


def _first_long_dim(sizes: Iterable[object]) -> int | None:
    """The first dim that is not always one: a part of it is contiguous."""
    return next((d for d, n in enumerate(sizes) if n != 1 or not query.is_static(n)), None)


def _grow(
    gm: GraphModule, schema: Schema, points: list[Node], within: Collection[str] | None = None
) -> Region:
    """The points' shares and all that can be computed from them; within: names of values that may take part."""
    region: Region = {}
    taken = _block_nodes(schema)
    for node in gm.graph.nodes:
        if node in points:
            dim = _token_dim(node)
            assert dim is not None, "callers drop points without tokens"
            cut = equal_chunks(query.shape(node)[dim], schema.num_ranks)
            assert cut is not None, "callers drop points with too few tokens"
            region[node] = Shard({dim: cut})
        elif node.name not in taken and (within is None or node.name in within):
            share = _share(node, region, schema.num_ranks)
            if share is not None:
                region[node] = share
    return region


def _block_nodes(schema: Schema) -> set[str]:
    """Names of all ops whose placement the blocks decide."""
    taken: set[str] = set()
    for block in schema.blocks:
        taken |= {name.partition(".")[0] for name in block.values}
        taken |= {*block.columns, *block.lookups, *block.heads, *([block.sink] if block.sink else [])}
        taken |= {user for _, users in block.slices.values() for user in users}
    return taken


def _share(node: Node, region: Region, num_ranks: int) -> Shard | None:
    """The part of the node's value that follows from its inputs' shares; None if the op needs more than those."""
    sources = [n for n in node.all_input_nodes if n in region]
    if (
        not sources
        or rules.find_rule(node) not in _ROW_WISE
        or not isinstance(query.value(node), torch.Tensor)
    ):
        return None
    (cut,) = region[sources[0]].dims.values()
    dim = _first_long_dim(query.shape(node))
    if dim is None:
        return None
    placement = Shard({dim: cut})
    try:
        inputs = _inputs_of(node, placement, num_ranks)
    except (CannotShard, NeedsUnit):
        return None
    return placement if all(inputs.get(source) == region[source] for source in sources) else None


def _inputs_of(node: Node, placement: Shard, num_ranks: int) -> dict[Node, Shard]:
    rule = rules.find_rule(node)
    assert rule is not None, f"{node.name} is in no region"
    inputs = rule(node, placement, rules.Context(num_ranks, inside_ok=False))
    return {source: part for source, part in inputs.items() if isinstance(part, Shard)}
