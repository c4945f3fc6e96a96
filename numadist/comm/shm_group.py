"""The group of ranks of one machine: every call is one of the core, in memory that all of them have mapped.

Blocking calls run on the calling thread without the GIL; async_op=True hands them to the group's worker thread.
"""

import datetime
import functools
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, Work

from numadist import _native
from numadist._native import Coll, Op, pointers
from numadist._native_replay import address_of
from numadist._native_replay import this_thread as _replay
from numadist.comm.base import NumaGroup
from numadist.comm.collective_calls import CollectiveCall
from numadist.comm.dtypes import CODES, REAL_CODES
from numadist.comm.dynamo import hide_from_dynamo
from numadist.comm.fused import AfterSum, all_reduce_fused
from numadist.comm.monitored_barrier import monitored_barrier
from numadist.comm.tensors import StagedOutputs, readable
from numadist.comm.works import DONE, CollectiveWork, MessageWork, TaskWork

_nd_all_reduce = _native.lib.nd_all_reduce
_nd_all_reduce_address = address_of(_nd_all_reduce)
_nd_reduce_scatter = _native.lib.nd_reduce_scatter
_nd_all_gather = _native.lib.nd_all_gather
# What the quickest calls look up.
_SUM, _STRIDED = Op.SUM, torch.strided
_TORCH_SUM: Any = ReduceOp.SUM  # torch's stubs do not say that options compare with it


class ShmGroup(NumaGroup):
    """Ranks of one machine that share a segment, which shutdown() unmaps."""

    _num_monitored = 0

    def __repr__(self) -> str:
        return f"ShmGroup(name={self._name!r}, rank={self._rank}, world={self._world})"

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        # What torch.distributed.all_reduce gives, without a look at what else torch's signatures allow.
        tensors, opts = args if len(args) == 2 else (None, None)
        if (
            type(opts) is AllreduceOptions
            and opts.reduceOp == _TORCH_SUM
            and not opts.asyncOp
            and type(tensors) is list
            and len(tensors) == 1
        ):
            self.all_reduce_(tensors[0], _SUM)
            return DONE
        return super().allreduce(*args, **kwargs)

    def all_reduce_(self, t: Tensor, op: Op) -> None:
        # The way of nearly all calls, kept short: decode makes thousands a second of a few microseconds each.
        dtype = REAL_CODES.get(t.dtype)
        address = t.data_ptr() if t.is_cpu and t.layout is _STRIDED else 1
        if dtype is None or address & 7 or not t.is_contiguous() or t.is_neg():
            if (found := _replay.recording) is not None:
                found.refused = "an all-reduce of other than plain numbers in order"
            super().all_reduce_(t, op)
            return
        handle, count = self._handle or self._core(), t.numel()
        if (found := _replay.recording) is not None:
            args = handle, address, address, count, dtype, op
            found.note(_nd_all_reduce_address, args, functools.partial(self._fail, t, op))
        if code := _nd_all_reduce(handle, address, address, count, dtype, op):
            raise self._error(code, [t], op)

    def _fail(self, t: Tensor, op: Op, code: int) -> None:
        raise self._error(code, [t], op)

    def reduce_scatter_(self, out: Tensor, t: Tensor, op: Op) -> None:
        # Compiled graphs make hundreds of these and of all_gather_ a forward.
        if not self._are_plain(t, out):
            super().reduce_scatter_(out, t, op)
            return
        ins, dtype = self._parts(t, out.nbytes), REAL_CODES[t.dtype]
        self._check(
            _nd_reduce_scatter(self._core(), ins, out.data_ptr(), out.numel(), dtype, int(op)), out, op
        )

    def all_gather_(self, out: Tensor, t: Tensor) -> None:
        if not self._are_plain(out, t):
            super().all_gather_(out, t)
            return
        outs = self._parts(out, t.nbytes)
        self._check(_nd_all_gather(self._core(), t.data_ptr(), outs, t.nbytes, CODES[t.dtype]), out)

    def _are_plain(self, large: Tensor, small: Tensor) -> bool:
        """Whether the core takes both as they are: real numbers in order, R times as many in `large`."""
        dtype = large.dtype
        if dtype not in REAL_CODES or small.dtype != dtype or large.numel() != small.numel() * self._world:
            return False
        for t in (large, small):
            if not (t.is_cpu and t.layout is torch.strided and t.is_contiguous()) or t.is_neg():
                return False
        return (large.data_ptr() | small.data_ptr()) % dtype.itemsize == 0

    def _parts(self, t: Tensor, num_bytes: int) -> Any:
        """C array of the addresses of the ranks' parts of a tensor, each of so many bytes."""
        address = t.data_ptr()
        return pointers([address + r * num_bytes for r in range(self._world)])

    def all_reduce_fused(self, x: Tensor, out: Tensor, after: AfterSum) -> None:
        self._check(all_reduce_fused(self._core(), x, out, after), x, Op.SUM)

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self._num_monitored += 1
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        # Negative tags are ours; a new one each time, so that a late rank does not pass the next barrier.
        tag = -self._num_monitored
        monitored_barrier(self._core(), self._rank, self._world, seconds, wait_all_ranks, tag)

    def _make(self, calls: list[CollectiveCall], result: list[Tensor], op: Op | None) -> None:
        handle = self._core()
        for call in calls:
            code = _native.run(handle, call.arguments)
            if code != 0:
                raise self._error(code, result, op)
            call.copy_back()

    def _start(self, calls: list[CollectiveCall], result: list[Tensor], op: Op | None) -> CollectiveWork:
        return TaskWork(self._core(), calls, lambda code: self._error(code, result, op), result)

    def _message(self, coll: Coll, t: Tensor, peer: int, tag: int) -> Work:
        handle, staged = self._core(), StagedOutputs()
        x = readable(t) if coll == Coll.SEND else staged.writable(t)
        code, request = _native.start_message(handle, coll, x.data_ptr(), x.nbytes, CODES[x.dtype], peer, tag)
        if code != 0:
            raise self._error(code)
        return self._remember(MessageWork(handle, request, x, self._error, staged.copy_back))


hide_from_dynamo(ShmGroup, TaskWork)
