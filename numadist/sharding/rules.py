"""One rule per op: from the placement of the output to the placements of the inputs.

A rule is called as `rule(node, placement, ctx)` and returns `{input node: Shard}` for the inputs that must be sharded;
an input that is not named must be replicated. It raises CannotShard with a reason, or NeedsUnit when another cut would
do. An op whose literal sizes change on a rank also has a `localize` function: `localize(node, shard, rank)` gives
the rank's arguments (and op, where a split becomes uneven).

The rules are on ops: no model and no module class is named here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from numadist.graph import query, sdpa
from numadist.graph.query import (
    argument,
    aten,
    integer,
    integers,
    is_static,
    operand,
    reshape_groups,
    sequence,
    shape,
    tensors,
)
from numadist.sharding.placement import CannotShard, DimShard, Shard, cut_size, merge, regroup, shift

NORM_NEEDS_WHOLE = "a norm needs the whole of the sharded dim"

Placement = Shard | dict[int, Shard]  # a dict is the placement of each output of an op that returns a list
InputPlacements = dict[Node, Placement]


@dataclass(frozen=True)
class Context:
    """What a rule may depend on besides its node."""

    num_ranks: int
    inside_ok: bool  # a rank may hold a share of one KV group


Rule = Callable[[Node, Any, Context], InputPlacements]
Localize = Callable[[Node, Any, int], tuple[Any, tuple[Any, ...]]]  # -> (op, args)

RULES: dict[Any, Rule] = {}
LOCALIZE: dict[Any, Localize] = {}


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register


def localize(*ops: Any) -> Callable[[Localize], Localize]:
    def register(function: Localize) -> Localize:
        for op in ops:
            LOCALIZE[op] = function
        return function

    return register


def find_rule(node: Node) -> Rule | None:
    """The rule of the node's op; every op that torch tags as pointwise shares one."""
    if node.op != "call_function":
        return None
    if node.target in RULES:
        return RULES[node.target]
    op = node.target
    if isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable and torch.Tag.pointwise in op.tags:
        return pointwise
    return None


def broadcast(source: Node, out_ndim: int, placement: Shard, last_dims: int = 0) -> Shard:
    """The part of `placement` that an input sees that is broadcast to the output; its own last `last_dims` are not."""
    sizes = shape(source)
    offset = out_ndim - len(sizes)
    dims = {
        d - offset: s
        for d, s in placement.dims.items()
        if d >= offset
        and d < out_ndim - last_dims
        and not (is_static(sizes[d - offset]) and sizes[d - offset] == 1)
    }
    return Shard(dims)


# Elementwise with broadcasting, but not tagged so by torch.
@rule(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.where.self, aten.gelu.default)
def pointwise(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    inputs: InputPlacements = {}
    for source in tensors((*node.args, *node.kwargs.values())):
        if isinstance(query.value(source), torch.Tensor):
            part = broadcast(source, len(shape(node)), placement)
            if part:
                inputs[source] = part
    return inputs


# Identity on values, whatever the dims.
@rule(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.type_as.default,
)
def identity(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    return {operand(node, 0): placement}


@rule(aten.dropout.default)
def dropout(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    if node.args[2] and node.args[1]:
        raise CannotShard("dropout in training mode draws other numbers on a shard")
    return {operand(node, 0): placement}


def positive(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def dim_of(node: Node, place: int, ndim: int, default: int | None = None) -> int:
    """The dim that the node's argument in this place names, from 0 to ndim - 1."""
    return positive(integer(node, place, "dim", default), ndim)


@rule(aten.transpose.int)
def transpose(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    ndim = len(shape(node))
    a, b = dim_of(node, 1, ndim), dim_of(node, 2, ndim)
    swap = {a: b, b: a}
    return {operand(node, 0): Shard({swap.get(d, d): s for d, s in placement.dims.items()})}


@rule(aten.t.default, aten.mT.default, aten.numpy_T.default)
def t(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    ndim = len(shape(node))
    swap = {ndim - 1: ndim - 2, ndim - 2: ndim - 1} if ndim > 1 else {}
    return {operand(node, 0): Shard({swap.get(d, d): s for d, s in placement.dims.items()})}


@rule(aten.permute.default)
def permute(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    order = integers(node, 1, "dims")
    return {operand(node, 0): Shard({positive(order[d], len(order)): s for d, s in placement.dims.items()})}


@rule(aten.unsqueeze.default)
def unsqueeze(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    new = dim_of(node, 1, len(shape(node)))
    return {operand(node, 0): Shard({d - (d > new): s for d, s in placement.dims.items()})}


@rule(aten.squeeze.dim, aten.select.int)
def drop_dim(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    source = operand(node, 0)
    if len(shape(source)) == len(shape(node)):  # squeeze of a dim that is not 1 does nothing
        return {source: placement}
    gone = dim_of(node, 1, len(shape(source)))
    return {source: Shard({d + (d >= gone): s for d, s in placement.dims.items()})}


@rule(aten.expand.default)
def expand(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    part = broadcast(operand(node, 0), len(shape(node)), placement)
    return {operand(node, 0): part} if part else {}


@rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
def view(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    source = operand(node, 0)
    in_shape, out_shape = shape(source), shape(node)
    dims: dict[int, DimShard] = {}
    for ins, outs in reshape_groups(in_shape, out_shape):
        part = {i: placement.dims[d] for i, d in enumerate(outs) if d in placement.dims}
        if not part:
            continue
        in_sizes, out_sizes = [in_shape[d] for d in ins], [out_shape[d] for d in outs]
        if len(ins) == len(outs) == 1:
            dims[ins[0]] = part[0]
        elif all(map(is_static, [*in_sizes, *out_sizes])):
            mapped = regroup(part, out_sizes, in_sizes, ctx.num_ranks, ctx.inside_ok)
            dims |= {ins[i]: s for i, s in mapped.items()}
        else:
            raise CannotShard(
                f"a reshape mixes a dynamic dim with the sharded one: {in_shape} -> {out_shape}"
            )
    result = Shard.of(dims, in_shape)
    return {source: result} if result else {}


@localize(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
def local_sizes(node: Node, placement: Shard, rank: int) -> tuple[Any, tuple[Any, ...]]:
    sizes = list(sequence(node, 1, "size"))
    for d, s in placement.dims.items():
        sizes[d] = s.local_size(rank)
    return node.target, (node.args[0], sizes, *node.args[2:])


@localize(aten.flatten.using_ints)
def local_flatten(node: Node, placement: Shard, rank: int) -> tuple[Any, tuple[Any, ...]]:
    return node.target, node.args  # names dims, not sizes


@localize(aten.unflatten.int)
def local_unflatten(node: Node, placement: Shard, rank: int) -> tuple[Any, tuple[Any, ...]]:
    source, dim, sizes = node.args[0], node.args[1], sequence(node, 2, "sizes")
    first = dim_of(node, 1, len(shape(operand(node, 0))))
    local = [
        placement.dims[first + i].local_size(rank) if first + i in placement.dims else n
        for i, n in enumerate(sizes)
    ]
    return node.target, (source, dim, local)


def _pieces(node: Node) -> list[Any]:
    return list(query.value(node))


def _split_dim(node: Node) -> int:
    return dim_of(node, 2, len(shape(operand(node, 0))), 0)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default)
def split(node: Node, placement: dict[int, Shard], ctx: Context) -> InputPlacements:
    pieces, dim = _pieces(node), _split_dim(node)
    if set(placement) != set(range(len(pieces))):
        raise CannotShard(f"only outputs {sorted(placement)} of {len(pieces)} of a split are sharded")
    across = [{d: s for d, s in placement[i].dims.items() if d != dim} for i in range(len(pieces))]
    if any(a != across[0] for a in across):
        raise CannotShard("the outputs of a split are sharded over different dims")
    along = [s for i in range(len(pieces)) if (s := placement[i].dims.get(dim)) is not None]
    dims = dict(across[0])
    if along:
        if len(along) < len(pieces):
            raise CannotShard("some outputs of a split are sharded along the split dim, others not")
        offsets = [sum(p.shape[dim] for p in pieces[:i]) for i in range(len(pieces))]
        cuts = tuple(
            merge(i for s, o in zip(along, offsets, strict=True) for i in shift(s.cuts[rank], o))
            for rank in range(ctx.num_ranks)
        )
        dims[dim] = DimShard(cuts, along[0].scale)
    return {operand(node, 0): Shard(dims)}


@localize(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default)
def local_split(node: Node, placement: dict[int, Shard], rank: int) -> tuple[Any, tuple[Any, ...]]:
    dim = _split_dim(node)
    if dim not in placement[0].dims:
        return node.target, node.args
    sizes = [cut_size(placement[i].dims[dim].cuts[rank]) for i in range(len(_pieces(node)))]
    return aten.split_with_sizes.default, (node.args[0], sizes, dim)


@rule(aten.unbind.int)
def unbind(node: Node, placement: dict[int, Shard], ctx: Context) -> InputPlacements:
    pieces = _pieces(node)
    gone = dim_of(node, 1, len(shape(operand(node, 0))), 0)
    if len(placement) != len(pieces) or any(placement[i] != placement[0] for i in range(len(pieces))):
        raise CannotShard("the outputs of an unbind are placed differently")
    return {operand(node, 0): Shard({d + (d >= gone): s for d, s in placement[0].dims.items()})}


@rule(aten.slice.Tensor)
def slice_(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    source, dim = operand(node, 0), dim_of(node, 1, len(shape(node)), 0)
    dims = dict(placement.dims)
    if dim in dims:
        dims[dim] = _interleaved(node, shape(source)[dim], dims[dim])
    return {source: Shard(dims)}


# Of aten.slice, after its dim.
_SLICE_DEFAULTS: tuple[tuple[str, Any], ...] = (("start", 0), ("end", None), ("step", 1))


def _interleaved(node: Node, size: Any, placement: DimShard) -> DimShard:
    """For every step-th index from the first ones on: all indices of the placed steps, whichever is picked of each."""
    start, end, step = (argument(node, 2 + i, n, d) for i, (n, d) in enumerate(_SLICE_DEFAULTS))
    to_the_end = end is None or (is_static(end) and is_static(size) and end >= size)
    if step == 1 or not to_the_end or not 0 <= (start or 0) < step or size % step:
        raise CannotShard("a slice along the sharded dim")
    cuts = tuple(tuple((a * step, b * step) for a, b in cut) for cut in placement.cuts)
    return DimShard(cuts, placement.scale // step if placement.scale % step == 0 else 0)


def _picked(ndim: int, indices: Any) -> tuple[list[int], int, dict[int, int]]:
    """Of x[indices]: the indexed dims of x, the number of dims they become, and for the others their place after it.

    As in numpy: the new dims come first if a slice separates the indexed ones, else where the first of them was.
    """
    indexed = [d for d, index in enumerate(indices) if index is not None]
    num_new = max(len(shape(indices[d])) for d in indexed)
    first = indexed[0] if indexed[-1] - indexed[0] == len(indexed) - 1 else 0
    rest = [d for d in range(ndim) if d not in indexed]
    return indexed, num_new, {d: i if i < first else i + num_new for i, d in enumerate(rest)}


@rule(aten.index.Tensor)
def index(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    """Picks from a tensor at computed places; dims that are not indexed may be sharded."""
    source, indices = operand(node, 0), sequence(node, 1, "indices")
    _, _, place = _picked(len(shape(source)), indices)
    dims = {d: placement.dims[i] for d, i in place.items() if i in placement.dims}
    if len(dims) < len(placement.dims):
        raise CannotShard("a pick of computed places, and the places are sharded")
    return {source: Shard(dims)}


@rule(aten.index_put_.default, aten.index_put.default)
def index_put(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    """Writes rows into a tensor at given places of the indexed dims; the other dims may be sharded."""
    target, indices, written = operand(node, 0), sequence(node, 1, "indices"), operand(node, 2)
    indexed, num_new, place = _picked(len(shape(node)), indices)
    if any(d in placement.dims for d in indexed):
        raise CannotShard("a write at computed places of the sharded dim")
    moved = Shard({place[d]: s for d, s in placement.dims.items()})
    inputs: InputPlacements = {target: placement}
    part = broadcast(written, num_new + len(place), moved)
    return {**inputs, written: part} if part else inputs


@rule(aten.cat.default, aten.stack.default)
def cat(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    ndim = len(shape(node))
    dim = dim_of(node, 1, ndim, 0)
    if dim in placement.dims:
        raise CannotShard("a concatenation along the sharded dim")
    stacked = node.target is aten.stack.default
    part = Shard({d - (stacked and d > dim): s for d, s in placement.dims.items()})
    return dict.fromkeys(tensors(sequence(node, 0, "tensors")), part)


@rule(aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten.cumsum.default)
def along_one_dim(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    if dim_of(node, 1, len(shape(node))) in placement.dims:
        raise CannotShard("this op runs along the sharded dim")
    return {operand(node, 0): placement}


@rule(aten.layer_norm.default, aten.rms_norm.default)
def norm(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    first_normalized = len(shape(node)) - len(sequence(node, 1, "normalized_shape"))
    if any(d >= first_normalized for d in placement.dims):
        raise CannotShard(NORM_NEEDS_WHOLE)
    return {operand(node, 0): placement}


@rule(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def reduction(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    source, dims = operand(node, 0), argument(node, 1, "dim")
    return {source: _unreduced(source, dims, len(shape(node)), placement)}


@rule(aten.max.dim, aten.min.dim)
def extreme(node: Node, placement: dict[int, Shard], ctx: Context) -> InputPlacements:
    """The largest along one dim, and where it is."""
    source = operand(node, 0)
    dim = dim_of(node, 1, len(shape(source)))
    parts = [_unreduced(source, [dim], _pieces(node)[i].dim(), part) for i, part in placement.items()]
    if any(part != parts[0] for part in parts):
        raise CannotShard("values and places of a maximum are sharded over different dims")
    return {source: parts[0]}


def _unreduced(source: Node, reduced: Any, ndim_after: int, placement: Shard) -> Shard:
    """What of the source goes into a part of its reduction over dims; all of them if none is named."""
    ndim = len(shape(source))
    gone = {positive(d, ndim) for d in (reduced or range(ndim))}
    kept = [d for d in range(ndim) if ndim_after == ndim or d not in gone]
    dims = {kept[d]: s for d, s in placement.dims.items()}
    if any(d in gone for d in dims):
        raise CannotShard("a reduction over the sharded dim")
    return Shard(dims)


# The complex numbers of rotary embeddings: the last dim of the real tensor holds both parts.
@rule(aten.view_as_complex.default, aten.view_as_real.default)
def complex_view(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    if node.target is aten.view_as_real.default and len(shape(node)) - 1 in placement.dims:
        raise CannotShard("the two parts of a complex number are sharded")
    return {operand(node, 0): placement}


@rule(aten.embedding.default)
def embedding(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    last = len(shape(node)) - 1
    if set(placement.dims) != {last}:
        raise CannotShard("an embedding can be sharded over its feature dim only")
    return {operand(node, 0): Shard({1: placement.dims[last]})}


@rule(aten.matmul.default, aten.bmm.default)
def matmul(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    return product(operand(node, 0), operand(node, 1), placement, len(shape(node)))


def product(a: Node, b: Node, placement: Shard, ndim: int) -> InputPlacements:
    """Batch dims are of both factors, rows of the first, columns of the second."""
    if len(shape(a)) < 2 or len(shape(b)) < 2:
        raise CannotShard("a product with a vector")
    left, right = (
        broadcast(a, ndim, placement, last_dims=2).dims,
        broadcast(b, ndim, placement, last_dims=2).dims,
    )
    if ndim - 2 in placement.dims:
        left = {**left, len(shape(a)) - 2: placement.dims[ndim - 2]}
    if ndim - 1 in placement.dims:
        right = {**right, len(shape(b)) - 1: placement.dims[ndim - 1]}
    return {source: Shard(dims) for source, dims in ((a, left), (b, right)) if dims}


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    source, repeats = operand(node, 0), integer(node, 1, "repeats")
    if argument(node, 2, "dim") is None:
        raise CannotShard("a repeat that flattens its input")
    dims = dict(placement.dims)
    dim = dim_of(node, 2, len(shape(node)))
    if dim in dims:
        size = shape(source)[dim]
        pair = regroup({0: dims.pop(dim)}, [size * repeats], [size, repeats], ctx.num_ranks, ctx.inside_ok)
        if any(cut != ((0, repeats),) for cut in pair[1].cuts):
            raise CannotShard(f"a cut would fall inside a group of {repeats} repeated indices")
        dims[dim] = pair[0]
    return {source: Shard.of(dims, shape(source))}


@rule(aten.baddbmm.default)
def baddbmm(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    added = operand(node, 0)
    inputs = product(operand(node, 1), operand(node, 2), placement, len(shape(node)))
    part = broadcast(added, len(shape(node)), placement)
    return {**inputs, added: part} if part else inputs


@rule(aten.scaled_dot_product_attention.default)
def attention(node: Node, placement: Shard, ctx: Context) -> InputPlacements:
    q, k, v = (operand(node, i) for i in range(3))
    ndim = len(shape(node))
    if any(d >= ndim - 2 for d in placement.dims):
        raise CannotShard("attention can be sharded over heads, not inside one")
    if sdpa.dropout(node) > 0:
        raise CannotShard("dropout inside attention draws other numbers on a shard")
    inputs: InputPlacements = {q: placement}
    heads, kv_heads = shape(q)[ndim - 3], shape(k)[ndim - 3]
    kv = dict(placement.dims)
    if ndim - 3 in kv and heads != kv_heads:  # enable_gqa: each KV head serves a group of query heads
        group = {1: kv.pop(ndim - 3)}
        # Heads are (KV head, member): give the placed heads as a shard of the pair and keep the KV head.
        pair = regroup({0: group[1]}, [heads], [kv_heads, heads // kv_heads], ctx.num_ranks, ctx.inside_ok)
        kv[ndim - 3] = pair[0]
    for source in (k, v):
        part = Shard.of(kv, shape(source))
        if part:
            inputs[source] = part
    mask = sdpa.mask(node)
    if mask is not None:
        part = broadcast(mask, ndim, placement)
        if part:
            inputs[mask] = part
    return inputs
