"""What a forward has to do, counted op by op: data that the cost model prices."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OpWork:
    """One op of the whole model. share: of it, what the rank with the largest part does when its block is sharded."""

    node: str
    kind: str  # linear | attention | other
    block: int | None  # index of the sharded block it belongs to; None: every rank does it whole
    share: float = 1.0
    rows: int = 0  # of a linear layer's input
    flops: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0  # read and written, ops that a compiler fuses counted once
    scores: float = 0.0  # elements of attention's score matrix
    mask: str = ""  # of attention: causal | dense (a tensor) | empty for none
    fits_ours: bool = False  # attention that our kernel computes, on CPUs that have it
    count: int = 1  # ops of this kind taken together

    @property
    def keys(self) -> float:
        """Of attention: how many keys a query looks at, hidden ones counted."""
        return self.scores / max(1, self.rows * self.count)


@dataclass(frozen=True)
class Reduction:
    """One all-reduce. weight: its part in this block's account where several blocks share it."""

    block: int
    num_bytes: int
    weight: float = 1.0


@dataclass(frozen=True)
class Work:
    """One forward under one schema."""

    num_ranks: int
    dtype: str  # of the weights: float32, bfloat16, ...
    ops: tuple[OpWork, ...]
    reductions: tuple[Reduction, ...]
    num_blocks: int

    def merged(self) -> "Work":
        """The same work for the same price, with alike ops taken together and without the account of each block."""
        return _collect(self, [(1, self)])


def extrapolated(one: Work, two: Work, layers: int) -> Work:
    """Merged work of `layers` equal layers, from that of a model with one and of the same with two."""
    return _collect(one, [(2 - layers, one), (layers - 1, two)])


def _collect(like: Work, parts: list[tuple[int, Work]]) -> Work:
    """Sum of (factor, work), one entry for all ops of a kind, share and number of rows."""
    ops: dict[tuple, OpWork] = {}
    sums: dict[int, float] = {}
    for factor, work in parts:
        for op in work.ops:
            key = (op.kind, op.share, op.rows, op.mask, op.fits_ours)
            ops[key] = _add(ops.get(key) or _nothing_like(op), op, factor)
        for r in work.reductions:
            sums[r.num_bytes] = sums.get(r.num_bytes, 0.0) + factor * r.weight
    reductions = tuple(Reduction(0, num_bytes, weight) for num_bytes, weight in sums.items())
    return replace(like, ops=tuple(ops.values()), reductions=reductions, num_blocks=1)


def _nothing_like(op: OpWork) -> OpWork:
    return replace(op, block=None, flops=0.0, weight_bytes=0.0, activation_bytes=0.0, scores=0.0, count=0)


def _add(total: OpWork, op: OpWork, factor: int) -> OpWork:
    return replace(
        total,
        flops=total.flops + factor * op.flops,
        weight_bytes=total.weight_bytes + factor * op.weight_bytes,
        activation_bytes=total.activation_bytes + factor * op.activation_bytes,
        scores=total.scores + factor * op.scores,
        count=total.count + factor * op.count,
    )
