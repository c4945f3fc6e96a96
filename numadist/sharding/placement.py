"""Where the parts of a tensor are: replicated, partial, or sharded by intervals.

A *cut* is what one rank holds of one dim: intervals of the global index space, in the order in which they lie in
the local tensor. One notation covers an even split, an uneven one, GPT-2's fused QKV (three intervals a rank) and
a KV head that several ranks hold (overlapping intervals).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Interval = tuple[int, int]  # [start, stop)
Cut = tuple[Interval, ...]  # what one rank holds of one dim

# Largest alignment the first attempt asks for: one tile of a bf16 GEMM, one cache line of fp32 four times over.
ALIGNMENT = 64
# A cut that leaves one rank this much above its even share is worth a smaller alignment.
MAX_IMBALANCE = 1.05


class CannotShard(Exception):
    """This value cannot be placed so; the text is the reason shown to the user."""


class NeedsUnit(Exception):
    """The cut must fall on multiples of `unit`, counted in indices of the sink's contracted dim."""

    def __init__(self, unit: int):
        super().__init__(f"cut must be a multiple of {unit}")
        self.unit = unit


@dataclass(frozen=True)
class DimShard:
    """One sharded dim. `scale`: how many indices of the sink's contracted dim one index of this dim stands for."""

    cuts: tuple[Cut, ...]
    scale: int = 1

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return max(stop for cut in self.cuts for _, stop in cut)

    def local_size(self, rank: int) -> int:
        return cut_size(self.cuts[rank])


class Shard:
    """Placement of a tensor sharded over some of its dims; an empty one means replicated. Immutable."""

    def __init__(self, dims: Mapping[int, DimShard]):
        self.dims = dict(sorted(dims.items()))

    @classmethod
    def of(cls, dims: Mapping[int, DimShard], shape: Iterable[object]) -> "Shard":
        """Shard without the dims of which every rank holds the whole."""
        sizes = list(shape)
        return cls({d: s for d, s in dims.items() if any(cut != ((0, sizes[d]),) for cut in s.cuts)})

    def __bool__(self) -> bool:
        return bool(self.dims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self._cuts() == other._cuts()

    def __hash__(self) -> int:
        return hash(tuple(self._cuts().items()))

    def __repr__(self) -> str:
        return f"Shard({self._cuts()})"

    def _cuts(self) -> dict[int, tuple[Cut, ...]]:
        return {d: s.cuts for d, s in self.dims.items()}

    def local_shape(self, shape: Iterable[int], rank: int) -> tuple[int, ...]:
        return tuple(self.dims[d].local_size(rank) if d in self.dims else n for d, n in enumerate(shape))

    def to_json(self) -> dict[str, list[Any]]:
        return {str(d): [[list(i) for i in cut] for cut in s.cuts] for d, s in self.dims.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, list[Any]]) -> "Shard":
        return cls(
            {
                int(d): DimShard(tuple(tuple((int(a), int(b)) for a, b in cut) for cut in cuts))
                for d, cuts in data.items()
            }
        )


def cut_size(cut: Cut) -> int:
    return sum(stop - start for start, stop in cut)


def indices_of(cut: Cut) -> list[int]:
    return [i for start, stop in cut for i in range(start, stop)]


def overlaps(cuts: tuple[Cut, ...]) -> bool:
    """Whether an index is held by several ranks."""
    held = sorted(interval for cut in cuts for interval in cut)
    return any(start < stop for (_, stop), (start, _) in pairwise(held))


def shift(cut: Cut, offset: int) -> Cut:
    return tuple((start + offset, stop + offset) for start, stop in cut)


def merge(intervals: Iterable[Interval]) -> Cut:
    """The same indices in the same order, neighbours joined, empty intervals dropped."""
    out: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def base_unit(size: int, num_ranks: int) -> int:
    """Largest power of two up to ALIGNMENT that divides `size` and splits it within MAX_IMBALANCE, else the best."""
    units = [u for u in (1 << i for i in range(ALIGNMENT.bit_length())) if size % u == 0]
    imbalance = {u: math.ceil(size // u / num_ranks) * u * num_ranks / size for u in units}
    good = [u for u in units if imbalance[u] <= MAX_IMBALANCE]
    return max(good) if good else min(units, key=lambda u: (imbalance[u], -u))


def equal_chunks(size: int, num_ranks: int, unit: int = 1) -> DimShard | None:
    """Chunks of one length, a multiple of `unit`, and only the last one shorter: gathered chunks need no index.

    None if a rank would get nothing.
    """
    chunk = math.ceil(size / num_ranks / unit) * unit
    if (num_ranks - 1) * chunk >= size:
        return None
    starts = [rank * chunk for rank in range(num_ranks)]
    return DimShard(tuple(((start, min(start + chunk, size)),) for start in starts))


def split_units(size: int, units: tuple[int, ...], num_ranks: int, first: int = 0) -> tuple[Cut, ...] | None:
    """Cut [0, size) for the ranks on multiples of the largest unit; None if there are too few units.

    `units` ascend and each divides the next. With fewer large units than ranks (three KV groups, four ranks) ranks
    are dealt to large units, and share one by cutting it on the next smaller unit. What cannot be even is uneven
    from place `first` on, in a circle: there ranks get one unit more, or units one rank more.
    """
    if size % units[-1]:
        return None
    count = size // units[-1]
    cuts: list[Cut] = []
    if count >= num_ranks:
        start = 0
        for rank in range(num_ranks):
            more = (rank - first) % num_ranks < count % num_ranks
            stop = start + (count // num_ranks + more) * units[-1]
            cuts.append(((start, stop),))
            start = stop
        return tuple(cuts)
    if len(units) == 1:
        return None
    for block in range(count):
        ranks_here = num_ranks // count + ((block - first) % count < num_ranks % count)
        inner = split_units(units[-1], units[:-1], ranks_here, first)
        if inner is None:
            return None
        cuts += [shift(cut, block * units[-1]) for cut in inner]
    return tuple(cuts)


def flatten(cuts: list[Cut | None], sizes: list[int]) -> Cut:
    """Intervals in the row-major index space of dims `sizes`; None stands for a whole dim."""
    flat: Cut = ((0, 1),)
    for cut, size in zip(cuts, sizes, strict=True):
        dim_cut = ((0, size),) if cut is None else cut
        if dim_cut == ((0, size),):
            flat = tuple((start * size, stop * size) for start, stop in flat)
        else:
            indices = [i for start, stop in flat for i in range(start, stop)]
            flat = merge((i * size + start, i * size + stop) for i in indices for start, stop in dim_cut)
    return merge(flat)


def unflatten(cut: Cut, sizes: list[int], inside_ok: bool) -> list[Cut]:
    """Inverse of `flatten`: one cut per dim; NotABox where the indices are not a product of cuts.

    `inside_ok` permits a rank to hold a part of one single outer index (a share of one KV group).
    """
    if len(sizes) == 1:
        return [cut]
    outer, inner = sizes[0], math.prod(sizes[1:])
    patterns: dict[int, list[Interval]] = {}
    for start, stop in cut:
        while start < stop:
            block = start // inner
            end = min(stop, (block + 1) * inner)
            patterns.setdefault(block, []).append((start - block * inner, end - block * inner))
            start = end
    merged = {block: merge(pattern) for block, pattern in patterns.items()}
    distinct = set(merged.values())
    blocks = merge((b, b + 1) for b in merged)
    if not distinct:  # a rank with nothing
        return [(), *[((0, n),) for n in sizes[1:]]]
    whole = distinct == {((0, inner),)}
    inside = len(distinct) == 1 and (blocks == ((0, outer),) or (inside_ok and len(merged) == 1))
    if not whole and not inside:
        raise NotABox(inner)
    pattern = next(iter(distinct))
    rest = [((0, n),) for n in sizes[1:]] if whole else unflatten(pattern, sizes[1:], inside_ok)
    return [blocks, *rest]


class NotABox(Exception):
    """Cuts must fall on multiples of `inner` in this flat index space."""

    def __init__(self, inner: int):
        self.inner = inner


def regroup(
    shards: dict[int, DimShard], out_sizes: list[int], in_sizes: list[int], num_ranks: int, inside_ok: bool
) -> dict[int, DimShard]:
    """Carry shards through a reshape of one group of dims: keys are positions inside the group.

    Raises: NeedsUnit if a larger unit would make the cut fall on index boundaries of the input.
    """
    scales = {
        d: s.scale // math.prod(out_sizes[d + 1 :]) if s.scale % math.prod(out_sizes[d + 1 :]) == 0 else 0
        for d, s in shards.items()
    }
    flat_scale = min((s for s in scales.values() if s), default=0)
    per_rank: list[list[Cut]] = []
    for rank in range(num_ranks):
        cuts = [shards[d].cuts[rank] if d in shards else None for d in range(len(out_sizes))]
        try:
            per_rank.append(unflatten(flatten(cuts, out_sizes), in_sizes, inside_ok))
        except NotABox as e:
            if flat_scale:
                raise NeedsUnit(flat_scale * e.inner) from None
            raise CannotShard(f"a cut would fall inside a group of {e.inner} indices") from None
    return {
        d: DimShard(tuple(cuts[d] for cuts in per_rank), max(flat_scale, 1) * math.prod(in_sizes[d + 1 :]))
        for d in range(len(in_sizes))
    }
