"""Sums over the threads of one process: each reads the others' partial values where they are."""

import contextlib
import itertools
import os
import secrets
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from numadist import _native
from numadist._native import Dtype, Op
from numadist.errors import ShardError
from numadist.sharding.collectives import Emitter

_DTYPES = {
    torch.float32: Dtype.F32,
    torch.float64: Dtype.F64,
    torch.bfloat16: Dtype.BF16,
    torch.float16: Dtype.F16,
}
_TIMEOUT_NS = 60 * 10**9
_SPIN_NS = 50 * 1000

_LIBRARY = torch.library.Library("numadist_inprocess", "DEF")
_LIBRARY.define("all_reduce(Tensor x, int exchange, int rank) -> Tensor")
_LIBRARY.define("all_gather(Tensor x, int exchange, int rank) -> Tensor")

_numbers = itertools.count()
_exchanges: "weakref.WeakValueDictionary[int, Exchange]" = weakref.WeakValueDictionary()


class Exchange:
    """What the threads of one model share: a slot each and the core's barrier, whose ranks may be threads.

    A second barrier ends every exchange: compiled code writes its buffers again at once, so nobody may return while
    somebody still reads.
    """

    def __init__(self, world: int):
        self.world = world
        self.number = next(_numbers)
        self._slots: list[Tensor | None] = [None] * world
        nonce = secrets.randbits(64)
        fd = _native.create_segment(world, nonce, 0, None)
        try:
            self._handles = [
                _native.open_group(fd, rank, world, nonce, _TIMEOUT_NS, _SPIN_NS) for rank in range(world)
            ]
        finally:
            os.close(fd)
        for handle in self._handles:
            _native.check(
                _native.connect_group(handle, [os.getpid()] * world), "connect the threads of a model"
            )
        weakref.finalize(self, _close, self._handles)
        _exchanges[self.number] = self

    @contextlib.contextmanager
    def meet(self, x: Tensor, rank: int) -> Iterator[list[Tensor]]:
        """Everybody's x, in rank order, until the block ends; waits without Python's lock."""
        self._slots[rank] = x
        self._barrier(rank)
        yield [t for t in self._slots if t is not None]
        self._barrier(rank)

    def _barrier(self, rank: int) -> None:
        _native.check(_native.lib.nd_barrier(self._handles[rank]), "wait for the other threads of a model")

    def all_reduce(self, x: Tensor, rank: int) -> Tensor:
        """Sum over the threads in rank order, in memory of this thread's node."""
        if x.dtype not in _DTYPES:
            raise ShardError(f"partial values of {x.dtype} cannot be summed; floats can")
        mine = x.contiguous()
        total = torch.empty_like(mine)
        isa = _native.supported_isas()[0]
        with self.meet(mine, rank) as parts:
            addresses = [p.data_ptr() for p in parts]
            _native.reduce_local(isa, total.data_ptr(), addresses, total.numel(), _DTYPES[x.dtype], Op.SUM)
        return total

    def all_gather(self, x: Tensor, rank: int) -> Tensor:
        """Everybody's x one after the other along dim 0."""
        with self.meet(x.contiguous(), rank) as parts:
            return torch.cat(parts)

    def emitter(self, rank: int) -> Emitter:
        """Writes this exchange into a rank's graph, as operators that torch.compile keeps whole."""
        ops = torch.ops.numadist_inprocess
        return Emitter(
            all_reduce=lambda g, x: g.call_function(ops.all_reduce.default, (x, self.number, rank)),
            all_gather=lambda g, x: g.call_function(ops.all_gather.default, (x, self.number, rank)),
        )


def _close(handles: list[int]) -> None:
    for handle in handles:
        _native.lib.nd_group_close(handle)


def _find(number: int) -> Exchange:
    exchange = _exchanges.get(number)
    if exchange is None:
        raise ShardError("this graph's threads are gone: its in-process model was closed or deleted")
    return exchange


@torch.library.impl(_LIBRARY, "all_reduce", "CPU")
def _all_reduce(x: Tensor, exchange: int, rank: int) -> Tensor:
    return _find(exchange).all_reduce(x, rank)


@torch.library.register_fake("numadist_inprocess::all_reduce", lib=_LIBRARY)
def _all_reduce_fake(x: Tensor, exchange: int, rank: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.impl(_LIBRARY, "all_gather", "CPU")
def _all_gather(x: Tensor, exchange: int, rank: int) -> Tensor:
    return _find(exchange).all_gather(x, rank)


@torch.library.register_fake("numadist_inprocess::all_gather", lib=_LIBRARY)
def _all_gather_fake(x: Tensor, exchange: int, rank: int) -> Tensor:
    return x.new_empty((x.shape[0] * _find(exchange).world, *x.shape[1:]))
