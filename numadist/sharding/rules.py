"""One rule per op: how a wanted placement of the output asks for placements of the inputs.

A rule is called as `rule(node, want, ctx)` and returns `{input node: Shard}` for the inputs that must be sharded; an
input that is not named must be replicated. It raises CannotShard with a reason, or NeedsUnit when another cut would
do. An op whose literal sizes change on a rank also has a `localize` function: `localize(node, shard, rank)` gives
the rank's arguments (and op, where a split becomes uneven).

The rules are on ops: no model and no module class is named here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from numadist.graph import query
from numadist.graph.query import aten, is_static, reshape_groups, shape, tensors
from numadist.sharding.placement import CannotShard, DimShard, Shard, cut_size, merge, regroup, shift

NORM_NEEDS_WHOLE = "a norm needs the whole of the sharded dim"

Want = Shard | dict[int, Shard]  # a dict is the wanted placement of each output of an op that returns a list
Demands = dict[Node, Want]


@dataclass(frozen=True)
class Context:
    """What a rule may depend on besides its node."""

    num_ranks: int
    inside_ok: bool  # a rank may hold a share of one KV group


Rule = Callable[[Node, Any, Context], Demands]
Localize = Callable[[Node, Any, int], tuple[Any, tuple]]  # -> (op, args)

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


def broadcast(source: Node, out_ndim: int, want: Shard, last_dims: int = 0) -> Shard:
    """The part of `want` an input sees that is broadcast to the output; its own last `last_dims` are not."""
    sizes = shape(source)
    offset = out_ndim - len(sizes)
    dims = {
        d - offset: s
        for d, s in want.dims.items()
        if d >= offset
        and d < out_ndim - last_dims
        and not (is_static(sizes[d - offset]) and sizes[d - offset] == 1)
    }
    return Shard(dims)


# Elementwise with broadcasting, but not tagged so by torch.
@rule(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.where.self, aten.gelu.default)
def pointwise(node: Node, want: Shard, ctx: Context) -> Demands:
    demands: Demands = {}
    for source in tensors((*node.args, *node.kwargs.values())):
        if isinstance(query.value(source), torch.Tensor):
            part = broadcast(source, len(shape(node)), want)
            if part:
                demands[source] = part
    return demands


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
def identity(node: Node, want: Shard, ctx: Context) -> Demands:
    return {node.args[0]: want}


@rule(aten.dropout.default)
def dropout(node: Node, want: Shard, ctx: Context) -> Demands:
    if node.args[2]:
        raise CannotShard("dropout in training mode draws other numbers on a shard")
    return {node.args[0]: want}


def positive(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


@rule(aten.transpose.int)
def transpose(node: Node, want: Shard, ctx: Context) -> Demands:
    source, a, b = node.args
    ndim = len(shape(node))
    a, b = positive(a, ndim), positive(b, ndim)
    swap = {a: b, b: a}
    return {source: Shard({swap.get(d, d): s for d, s in want.dims.items()})}


@rule(aten.t.default, aten.mT.default, aten.numpy_T.default)
def t(node: Node, want: Shard, ctx: Context) -> Demands:
    ndim = len(shape(node))
    swap = {ndim - 1: ndim - 2, ndim - 2: ndim - 1} if ndim > 1 else {}
    return {node.args[0]: Shard({swap.get(d, d): s for d, s in want.dims.items()})}


@rule(aten.permute.default)
def permute(node: Node, want: Shard, ctx: Context) -> Demands:
    source, order = node.args
    return {source: Shard({positive(order[d], len(order)): s for d, s in want.dims.items()})}


@rule(aten.unsqueeze.default)
def unsqueeze(node: Node, want: Shard, ctx: Context) -> Demands:
    new = positive(node.args[1], len(shape(node)))
    return {node.args[0]: Shard({d - (d > new): s for d, s in want.dims.items()})}


@rule(aten.squeeze.dim, aten.select.int)
def drop_dim(node: Node, want: Shard, ctx: Context) -> Demands:
    source, dim = node.args[:2]
    if len(shape(source)) == len(shape(node)):  # squeeze of a dim that is not 1 does nothing
        return {source: want}
    gone = positive(dim, len(shape(source)))
    return {source: Shard({d + (d >= gone): s for d, s in want.dims.items()})}


@rule(aten.expand.default)
def expand(node: Node, want: Shard, ctx: Context) -> Demands:
    part = broadcast(node.args[0], len(shape(node)), want)
    return {node.args[0]: part} if part else {}


@rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
def view(node: Node, want: Shard, ctx: Context) -> Demands:
    source = node.args[0]
    in_shape, out_shape = shape(source), shape(node)
    dims: dict[int, DimShard] = {}
    for ins, outs in reshape_groups(in_shape, out_shape):
        part = {i: want.dims[d] for i, d in enumerate(outs) if d in want.dims}
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
def local_sizes(node: Node, want: Shard, rank: int) -> tuple[Any, tuple]:
    sizes = list(node.args[1])
    for d, s in want.dims.items():
        sizes[d] = s.local_size(rank)
    return node.target, (node.args[0], sizes, *node.args[2:])


@localize(aten.flatten.using_ints)
def local_flatten(node: Node, want: Shard, rank: int) -> tuple[Any, tuple]:
    return node.target, node.args  # names dims, not sizes


@localize(aten.unflatten.int)
def local_unflatten(node: Node, want: Shard, rank: int) -> tuple[Any, tuple]:
    source, dim, sizes = node.args
    first = positive(dim, len(shape(source)))
    local = [
        want.dims[first + i].local_size(rank) if first + i in want.dims else n for i, n in enumerate(sizes)
    ]
    return node.target, (source, dim, local)


def _pieces(node: Node) -> list[Any]:
    return list(query.value(node))


def _split_dim(node: Node) -> int:
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return positive(dim, len(shape(node.args[0])))


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default)
def split(node: Node, want: dict[int, Shard], ctx: Context) -> Demands:
    pieces, dim = _pieces(node), _split_dim(node)
    if set(want) != set(range(len(pieces))):
        raise CannotShard(f"only outputs {sorted(want)} of {len(pieces)} of a split are sharded")
    across = [{d: s for d, s in want[i].dims.items() if d != dim} for i in range(len(pieces))]
    if any(a != across[0] for a in across):
        raise CannotShard("the outputs of a split are sharded over different dims")
    along = [want[i].dims.get(dim) for i in range(len(pieces))]
    dims = dict(across[0])
    if any(along):
        if not all(along):
            raise CannotShard("some outputs of a split are sharded along the split dim, others not")
        offsets = [sum(p.shape[dim] for p in pieces[:i]) for i in range(len(pieces))]
        cuts = tuple(
            merge(i for s, o in zip(along, offsets, strict=True) for i in shift(s.cuts[rank], o))
            for rank in range(ctx.num_ranks)
        )
        dims[dim] = DimShard(cuts, along[0].scale)
    return {node.args[0]: Shard(dims)}


@localize(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default)
def local_split(node: Node, want: dict[int, Shard], rank: int) -> tuple[Any, tuple]:
    dim = _split_dim(node)
    if dim not in want[0].dims:
        return node.target, node.args
    sizes = [cut_size(want[i].dims[dim].cuts[rank]) for i in range(len(_pieces(node)))]
    return aten.split_with_sizes.default, (node.args[0], sizes, dim)


@rule(aten.unbind.int)
def unbind(node: Node, want: dict[int, Shard], ctx: Context) -> Demands:
    pieces = _pieces(node)
    gone = positive(node.args[1] if len(node.args) > 1 else 0, len(shape(node.args[0])))
    if len(want) != len(pieces) or any(want[i] != want[0] for i in range(len(pieces))):
        raise CannotShard("the outputs of an unbind are placed differently")
    return {node.args[0]: Shard({d + (d >= gone): s for d, s in want[0].dims.items()})}


@rule(aten.slice.Tensor)
def slice_(node: Node, want: Shard, ctx: Context) -> Demands:
    source = node.args[0]
    dim = positive(node.args[1] if len(node.args) > 1 else 0, len(shape(node)))
    dims = dict(want.dims)
    if dim in dims:
        dims[dim] = _interleaved(node, shape(source)[dim], dims[dim])
    return {source: Shard(dims)}


def _interleaved(node: Node, size: Any, want: DimShard) -> DimShard:
    """For every step-th index from the first ones on: all indices of the wanted steps, whichever is picked of each."""
    start, end, step = (*node.args[2:], *(0, None, 1)[len(node.args) - 2 :])
    to_the_end = end is None or (is_static(end) and is_static(size) and end >= size)
    if step == 1 or not to_the_end or not 0 <= (start or 0) < step or size % step:
        raise CannotShard("a slice along the sharded dim")
    cuts = tuple(tuple((a * step, b * step) for a, b in cut) for cut in want.cuts)
    return DimShard(cuts, want.scale // step if want.scale % step == 0 else 0)


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
def index(node: Node, want: Shard, ctx: Context) -> Demands:
    """Picks from a tensor at computed places; dims that are not indexed may be sharded."""
    source, indices = node.args
    _, _, place = _picked(len(shape(source)), indices)
    dims = {d: want.dims[i] for d, i in place.items() if i in want.dims}
    if len(dims) < len(want.dims):
        raise CannotShard("a pick of computed places, and the places are sharded")
    return {source: Shard(dims)}


@rule(aten.index_put_.default, aten.index_put.default)
def index_put(node: Node, want: Shard, ctx: Context) -> Demands:
    """Writes rows into a tensor at given places of the indexed dims; the other dims may be sharded."""
    target, indices, written = node.args[:3]
    indexed, num_new, place = _picked(len(shape(node)), indices)
    if any(d in want.dims for d in indexed):
        raise CannotShard("a write at computed places of the sharded dim")
    moved = Shard({place[d]: s for d, s in want.dims.items()})
    demands: Demands = {target: want}
    part = broadcast(written, num_new + len(place), moved)
    return {**demands, written: part} if part else demands


@rule(aten.cat.default, aten.stack.default)
def cat(node: Node, want: Shard, ctx: Context) -> Demands:
    ndim = len(shape(node))
    dim = positive(node.args[1] if len(node.args) > 1 else 0, ndim)
    if dim in want.dims:
        raise CannotShard("a concatenation along the sharded dim")
    stacked = node.target is aten.stack.default
    part = Shard({d - (stacked and d > dim): s for d, s in want.dims.items()})
    return dict.fromkeys(node.args[0], part)


@rule(aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten.cumsum.default)
def along_one_dim(node: Node, want: Shard, ctx: Context) -> Demands:
    if positive(node.args[1], len(shape(node))) in want.dims:
        raise CannotShard("this op runs along the sharded dim")
    return {node.args[0]: want}


@rule(aten.layer_norm.default, aten.rms_norm.default)
def norm(node: Node, want: Shard, ctx: Context) -> Demands:
    first_normalized = len(shape(node)) - len(node.args[1])
    if any(d >= first_normalized for d in want.dims):
        raise CannotShard(NORM_NEEDS_WHOLE)
    return {node.args[0]: want}


@rule(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def reduction(node: Node, want: Shard, ctx: Context) -> Demands:
    source = node.args[0]
    return {source: _unreduced(source, node.args[1], len(shape(node)), want)}


@rule(aten.max.dim, aten.min.dim)
def extreme(node: Node, want: dict[int, Shard], ctx: Context) -> Demands:
    """The largest along one dim, and where it is."""
    source, dim = node.args[:2]
    parts = [_unreduced(source, [dim], _pieces(node)[i].dim(), part) for i, part in want.items()]
    if any(part != parts[0] for part in parts):
        raise CannotShard("values and places of a maximum are sharded over different dims")
    return {source: parts[0]}


def _unreduced(source: Node, reduced: Any, ndim_after: int, want: Shard) -> Shard:
    """What of the source goes into a part of its reduction over dims; all of them if none is named."""
    ndim = len(shape(source))
    gone = {positive(d, ndim) for d in (reduced or range(ndim))}
    kept = [d for d in range(ndim) if ndim_after == ndim or d not in gone]
    dims = {kept[d]: s for d, s in want.dims.items()}
    if any(d in gone for d in dims):
        raise CannotShard("a reduction over the sharded dim")
    return Shard(dims)


# The complex numbers of rotary embeddings: the last dim of the real tensor holds both parts.
@rule(aten.view_as_complex.default, aten.view_as_real.default)
def complex_view(node: Node, want: Shard, ctx: Context) -> Demands:
    if node.target is aten.view_as_real.default and len(shape(node)) - 1 in want.dims:
        raise CannotShard("the two parts of a complex number are sharded")
    return {node.args[0]: want}


@rule(aten.embedding.default)
def embedding(node: Node, want: Shard, ctx: Context) -> Demands:
    last = len(shape(node)) - 1
    if set(want.dims) != {last}:
        raise CannotShard("an embedding can be sharded over its feature dim only")
    return {node.args[0]: Shard({1: want.dims[last]})}


@rule(aten.matmul.default, aten.bmm.default)
def matmul(node: Node, want: Shard, ctx: Context) -> Demands:
    a, b = node.args
    return product(a, b, want, len(shape(node)))


def product(a: Node, b: Node, want: Shard, ndim: int) -> Demands:
    """Batch dims are wanted of both factors, rows of the first, columns of the second."""
    if len(shape(a)) < 2 or len(shape(b)) < 2:
        raise CannotShard("a product with a vector")
    left, right = broadcast(a, ndim, want, last_dims=2).dims, broadcast(b, ndim, want, last_dims=2).dims
    if ndim - 2 in want.dims:
        left = {**left, len(shape(a)) - 2: want.dims[ndim - 2]}
    if ndim - 1 in want.dims:
        right = {**right, len(shape(b)) - 1: want.dims[ndim - 1]}
    return {source: Shard(dims) for source, dims in ((a, left), (b, right)) if dims}


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(node: Node, want: Shard, ctx: Context) -> Demands:
    source, repeats, *rest = node.args
    repeats = int(repeats)
    dim = (rest or [node.kwargs.get("dim")])[0]
    if dim is None:
        raise CannotShard("a repeat that flattens its input")
    dims = dict(want.dims)
    dim = positive(dim, len(shape(node)))
    if dim in dims:
        size = shape(source)[dim]
        pair = regroup({0: dims.pop(dim)}, [size * repeats], [size, repeats], ctx.num_ranks, ctx.inside_ok)
        if any(cut != ((0, repeats),) for cut in pair[1].cuts):
            raise CannotShard(f"a cut would fall inside a group of {repeats} repeated indices")
        dims[dim] = pair[0]
    return {source: Shard.of(dims, shape(source))}


@rule(aten.baddbmm.default)
def baddbmm(node: Node, want: Shard, ctx: Context) -> Demands:
    added, a, b = node.args
    demands = product(a, b, want, len(shape(node)))
    part = broadcast(added, len(shape(node)), want)
    return {**demands, added: part} if part else demands


@rule(aten.scaled_dot_product_attention.default)
def attention(node: Node, want: Shard, ctx: Context) -> Demands:
    q, k, v, *rest = node.args
    ndim = len(shape(node))
    if any(d >= ndim - 2 for d in want.dims):
        raise CannotShard("attention can be sharded over heads, not inside one")
    if (rest[1] if len(rest) > 1 else node.kwargs.get("dropout_p", 0.0)) > 0:
        raise CannotShard("dropout inside attention draws other numbers on a shard")
    demands: Demands = {q: want}
    heads, kv_heads = shape(q)[ndim - 3], shape(k)[ndim - 3]
    kv = dict(want.dims)
    if ndim - 3 in kv and heads != kv_heads:  # enable_gqa: each KV head serves a group of query heads
        group = {1: kv.pop(ndim - 3)}
        # Heads are (KV head, member): give the wanted heads as a shard of the pair and keep the KV head.
        pair = regroup({0: group[1]}, [heads], [kv_heads, heads // kv_heads], ctx.num_ranks, ctx.inside_ok)
        kv[ndim - 3] = pair[0]
    for source in (k, v):
        part = Shard.of(kv, shape(source))
        if part:
            demands[source] = part
    mask = rest[0] if rest else node.kwargs.get("attn_mask")
    if isinstance(mask, Node):
        part = broadcast(mask, ndim, want)
        if part:
            demands[mask] = part
    return demands
