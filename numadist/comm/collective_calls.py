"""From torch's tensors to calls of the core: checked, and staged where the core cannot use a tensor's memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numadist import _native
from numadist._native import Arguments, Coll, Op, pointers
from numadist.comm.dtypes import CODES, REDUCIBLE
from numadist.comm.tensors import StagedOutputs, readable, same_dtype_and_size
from numadist.errors import CommError


@dataclass
class CollectiveCall:
    """A collective that the core can make, now or later."""

    arguments: Arguments
    keep: list[Any]  # what the arguments point to
    copy_back: Callable[[], None]  # stores staged results; called when the collective is done


def barrier() -> CollectiveCall:
    return CollectiveCall(Arguments(coll=Coll.BARRIER), [], lambda: None)


def reduction(x: Tensor, op: Op) -> tuple[int, int]:
    """(the core's dtype, number of its elements) of a tensor to reduce. Raises: CommError."""
    code, width = REDUCIBLE.get(x.dtype, (None, 0))
    if code is None:
        raise CommError(f"backend numa cannot reduce {x.dtype}; convert it, or gather and reduce yourself")
    if width == 2 and op not in (Op.SUM, Op.AVG):
        raise CommError(f"{op.name} of {x.dtype} has no meaning here; complex numbers have SUM and AVG")
    return code, x.numel() * width


def in_place(coll: Coll, t: Tensor, op: Op, root: int = -1) -> CollectiveCall:
    """An all_reduce or reduce of t, which gets the result."""
    outputs = StagedOutputs()
    x = outputs.writable(t, keep=True)
    dtype, count = reduction(x, op)
    arguments = Arguments(coll=coll, dtype=dtype, op=op, root=root, count=count)
    arguments.in_ = arguments.out = x.data_ptr()
    return CollectiveCall(arguments, [x], outputs.copy_back)


def broadcast(t: Tensor, root: int) -> CollectiveCall:
    """t on every rank = t on the root."""
    outputs = StagedOutputs()
    x = outputs.writable(t, keep=True)
    arguments = Arguments(coll=Coll.BROADCAST, dtype=CODES[x.dtype], root=root, count=x.nbytes)
    arguments.out = x.data_ptr()
    return CollectiveCall(arguments, [x], outputs.copy_back)


def all_gather(outs: Sequence[Tensor], t: Tensor) -> CollectiveCall:
    """outs[r] = rank r's t."""
    x, staged = readable(t), StagedOutputs()
    same_dtype_and_size("all_gather", outs, x.dtype, x.numel())
    ys = [staged.writable(out) for out in outs]
    arguments = Arguments(coll=Coll.ALL_GATHER, dtype=CODES[x.dtype], count=x.nbytes)
    arguments.in_, arguments.outs = x.data_ptr(), pointers(y.data_ptr() for y in ys)
    return CollectiveCall(arguments, [x, ys], staged.copy_back)


def all_gather_single(output: Tensor, t: Tensor, world: int) -> CollectiveCall:
    """output = everybody's t, one after the other."""
    staged = StagedOutputs()
    call = all_gather(_parts("all_gather_into_tensor", staged.writable(output), t.numel(), world), t)
    call.copy_back = staged.copy_back
    return call


def reduce_scatter(output: Tensor, ins: Sequence[Tensor], op: Op) -> CollectiveCall:
    """output = reduction over ranks of their ins[my rank]."""
    staged = StagedOutputs()
    same_dtype_and_size("reduce_scatter", ins, output.dtype, output.numel())
    y, xs = staged.writable(output), [readable(t) for t in ins]
    dtype, count = reduction(y, op)
    arguments = Arguments(coll=Coll.REDUCE_SCATTER, dtype=dtype, op=op, count=count)
    arguments.ins, arguments.out = pointers(x.data_ptr() for x in xs), y.data_ptr()
    return CollectiveCall(arguments, [xs, y], staged.copy_back)


def reduce_scatter_single(output: Tensor, t: Tensor, op: Op, world: int) -> CollectiveCall:
    return reduce_scatter(output, _parts("reduce_scatter_tensor", readable(t), output.numel(), world), op)


def scatter(output: Tensor, inputs: Sequence[Tensor], root: int) -> CollectiveCall:
    """inputs: one a rank on the root, none elsewhere."""
    staged = StagedOutputs()
    y, xs = staged.writable(output), [readable(t) for t in inputs]
    same_dtype_and_size("scatter", xs, y.dtype, y.numel())
    arguments = Arguments(coll=Coll.SCATTER, dtype=CODES[y.dtype], root=root, count=y.nbytes)
    arguments.ins, arguments.out = pointers(x.data_ptr() for x in xs), y.data_ptr()
    return CollectiveCall(arguments, [xs, y], staged.copy_back)


def gather(outs: Sequence[Tensor], t: Tensor, root: int) -> CollectiveCall:
    """outs: one a rank on the root, none elsewhere."""
    staged, x = StagedOutputs(), readable(t)
    same_dtype_and_size("gather", outs, x.dtype, x.numel())
    ys = [staged.writable(out) for out in outs]
    arguments = Arguments(coll=Coll.GATHER, dtype=CODES[x.dtype], root=root, count=x.nbytes)
    arguments.in_, arguments.outs = x.data_ptr(), pointers(y.data_ptr() for y in ys)
    return CollectiveCall(arguments, [x, ys], staged.copy_back)


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], world: int) -> CollectiveCall:
    """outputs[r] = rank r's inputs[my rank]; sizes may differ."""
    staged = StagedOutputs()
    xs, ys = [readable(t) for t in inputs], [staged.writable(t) for t in outputs]
    if not len(xs) == len(ys) == world:
        raise CommError(f"all_to_all: {len(xs)} inputs and {len(ys)} outputs for {world} ranks")
    if len(dtypes := {t.dtype for t in xs + ys}) != 1:
        raise CommError(f"all_to_all: tensors of several dtypes: {sorted(map(str, dtypes))}")
    arguments = Arguments(coll=Coll.ALL_TO_ALL, dtype=CODES[xs[0].dtype])
    arguments.ins, arguments.outs = pointers(x.data_ptr() for x in xs), pointers(y.data_ptr() for y in ys)
    arguments.in_bytes = _native.sizes([x.nbytes for x in xs])
    arguments.out_bytes = _native.sizes([y.nbytes for y in ys])
    return CollectiveCall(arguments, [xs, ys], staged.copy_back)


def all_to_all_single(
    output: Tensor, t: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], world: int
) -> CollectiveCall:
    """all_to_all of rows (dimension 0): the splits count them; an empty list is an even split."""
    staged = StagedOutputs()
    y, x = staged.writable(output), readable(t)
    call = all_to_all(_rows("output", y, out_splits, world), _rows("input", x, in_splits, world), world)
    call.copy_back = staged.copy_back
    return call


def _parts(what: str, whole: Tensor, numel: int, world: int) -> list[Tensor]:
    """A contiguous tensor cut in one flat part of `numel` elements per rank."""
    if whole.numel() != numel * world:
        raise CommError(
            f"{what}: the large tensor has {whole.numel()} elements, the small one {numel} on each of "
            f"{world} ranks; the large one must have exactly as many as all small ones"
        )
    return list(torch.split(whole.view(-1), numel)) if numel else [whole.view(-1)] * world


def _rows(what: str, t: Tensor, splits: Sequence[int], world: int) -> list[Tensor]:
    if not splits:
        if t.dim() == 0 or t.size(0) % world:
            raise CommError(f"all_to_all_single: {what} {list(t.shape)} does not split into {world} parts")
        splits = [t.size(0) // world] * world
    if len(splits) != world or sum(splits) != t.size(0):
        raise CommError(f"all_to_all_single: {what} splits {list(splits)} do not add up to {t.size(0)} rows")
    return list(torch.split(t, list(splits)))
