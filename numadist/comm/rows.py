"""reduce_scatter and all_gather along dim 0 by the shortest way: compiled graphs make hundreds of them a forward."""

from typing import Any

from torch import Tensor

from numadist import _native
from numadist._native import Op, pointers
from numadist.comm.dtypes import CODES, PLAIN

_SUM = int(Op.SUM)


def are_plain(large: Tensor, small: Tensor, world: int) -> bool:
    """Whether the functions below take them: numbers in order, `world` times as many in the large tensor."""
    alike = large.dtype == small.dtype and large.numel() == small.numel() * world
    return (
        alike and large.dtype in PLAIN and all(t.is_contiguous() and not t.is_neg() for t in (large, small))
    )


def reduce_scatter(handle: int, out: Tensor, x: Tensor, world: int) -> int:
    """out = this rank's part of the sum of x over the ranks; the core's code."""
    ins = _parts(x, out.nbytes, world)
    return _native.lib.nd_reduce_scatter(handle, ins, out.data_ptr(), out.numel(), PLAIN[x.dtype], _SUM)


def all_gather(handle: int, out: Tensor, x: Tensor, world: int) -> int:
    """out = everybody's x, one after the other; the core's code."""
    outs = _parts(out, x.nbytes, world)
    return _native.lib.nd_all_gather(handle, x.data_ptr(), outs, x.nbytes, CODES[x.dtype])


def _parts(t: Tensor, num_bytes: int, world: int) -> Any:
    address = t.data_ptr()
    return pointers(address + r * num_bytes for r in range(world))
