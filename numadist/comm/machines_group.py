"""A group over several machines: shared memory inside each, torch's own Gloo between them.

Legend: M machines, L lanes. Lane i joins the ranks with local number i of all machines; L is the number of ranks on the
smallest machine. A message is cut in L parts, so that all ranks of a machine carry it to the other machines at once.
"""

import contextlib
import datetime
import errno
import re
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from numadist import _native
from numadist._native import Arguments, Call, Coll, Op
from numadist.comm import failures
from numadist.comm.base import Connect, NumaGroup
from numadist.comm.collective_calls import CollectiveCall
from numadist.comm.dtypes import REAL_CODES
from numadist.comm.dynamo import hide_from_dynamo
from numadist.comm.tensors import readable
from numadist.comm.works import CollectiveWork
from numadist.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

_DTYPES = {code: dtype for dtype, code in REAL_CODES.items()}
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in _DTYPES.items()}
_GLOO_LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|timed out connecting")
_GLOO_LATE = re.compile(r"[Tt]imed? ?out")


def _bytes(address: int | None, num_bytes: int) -> Tensor:
    """The memory at an address as a tensor."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_native.memory(address or 0, num_bytes), dtype=torch.uint8)


class ThreadWork(CollectiveWork):
    """Collectives that the group's thread makes one after the other."""

    def __init__(self, made: Future[None], calls: list[CollectiveCall], result: list[Tensor]):
        super().__init__(calls, result)
        self._made = made

    def _poll(self, timeout_ns: int) -> Exception | bool:
        try:
            error = self._made.exception(None if timeout_ns == _native.FOREVER else timeout_ns / 1e9)
        except NotYet:
            return False
        except CancelledError:
            return CommError("the group was destroyed before this call began")
        return error if isinstance(error, Exception) else True


class MachinesGroup(NumaGroup):
    """Ranks of several machines; the handle is that of this machine's ranks, and a thread makes all collectives.

    Reductions and broadcasts go machine by machine, the other collectives and messages plainly over Gloo.
    """

    def __init__(
        self,
        handle: int,
        rank: int,
        machines: list[list[int]],
        timeout_s: float,
        store: Store,
        connect: Connect,
    ):
        super().__init__(handle, rank, sum(map(len, machines)), timeout_s, store, connect)
        self._machines = machines
        self._machine = next(i for i, ranks in enumerate(machines) if rank in ranks)
        self._local_ranks = machines[self._machine]
        self._local_rank = self._local_ranks.index(rank)
        self._num_lanes = min(map(len, machines))
        self._failure: CommError | None = None
        timeout = datetime.timedelta(seconds=timeout_s)
        # torch's stubs know none of Gloo's methods.
        self._all: Any = ProcessGroupGloo(PrefixStore("all", store), rank, self._world, timeout)
        self._lane: Any = None
        if self._local_rank < self._num_lanes:
            prefix = PrefixStore(f"lane{self._local_rank}", store)
            self._lane = ProcessGroupGloo(prefix, self._machine, len(machines), timeout)
        self._thread = ThreadPoolExecutor(1, "numadist-machines")

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        super().set_timeout(timeout)
        for gloo in self._gloos():
            gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        """Make the running and all later calls of every rank fail; a call of this rank that waits in Gloo ends last."""
        self._failure = CommError(
            f"rank {self._rank}: group {self._name!r} was aborted by rank {self._rank}."
        )
        self._leave()

    def shutdown(self) -> None:
        # Calls that have not begun would wait for ranks that leave too.
        self._thread.shutdown(wait=True, cancel_futures=True)
        super().shutdown()

    def _gloos(self) -> list[Any]:
        return [gloo for gloo in (self._all, self._lane) if gloo is not None]

    def __repr__(self) -> str:
        return f"MachinesGroup(name={self._name!r}, rank={self._rank}, machines={self._machines})"

    # ---- on the caller's thread -----------------------------------------------------------------------------

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        limit = datetime.timedelta(seconds=self._timeout_s) if timeout is None else timeout
        self._all.monitored_barrier(limit, wait_all_ranks)

    def _message(self, coll: Coll, t: Tensor, peer: int, tag: int) -> Work:
        if self._failure is not None:
            raise self._failure
        self._core()
        work: Work
        if coll == Coll.SEND:
            work = self._all.send([readable(t)], peer, tag)
        elif peer < 0:
            work = self._all.recv_anysource([t], tag)
        else:
            work = self._all.recv([t], peer, tag)
        return work

    def _make(self, calls: list[CollectiveCall], result: list[Tensor], op: Op | None) -> None:
        self._start(calls, result, op).wait()

    def _start(self, calls: list[CollectiveCall], result: list[Tensor], op: Op | None) -> CollectiveWork:
        self._core()
        for call in calls if op is not None else []:
            if not _native.can_reduce(call.arguments.dtype, call.arguments.op):
                raise self._error(-errno.EOPNOTSUPP, result, op)
        return ThreadWork(self._thread.submit(self._make_all, calls), calls, result)

    # ---- on the group's thread ----------------------------------------------------------------------------

    def _make_all(self, calls: list[CollectiveCall]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            for call in calls:
                self._agree(call.arguments)
                self._make_one(call.arguments)
        except (CommError, RuntimeError) as error:
            self._failure = error if isinstance(error, CommError) else self._between_machines(error)
            self._leave()
            raise self._failure from None

    def _leave(self) -> None:
        """Let no rank wait for this one, which has failed: those of this machine, and those connected by Gloo."""
        with contextlib.suppress(CommError):
            super().abort()
        self._all = self._lane = None

    def _make_one(self, a: Arguments) -> None:
        make = {
            Coll.BARRIER: self._barrier,
            Coll.ALL_REDUCE: self._all_reduce,
            Coll.REDUCE: self._reduce,
            Coll.REDUCE_SCATTER: self._reduce_scatter,
            Coll.BROADCAST: self._broadcast,
            Coll.ALL_GATHER: self._all_gather,
            Coll.GATHER: self._gather,
            Coll.SCATTER: self._scatter,
            Coll.ALL_TO_ALL: self._all_to_all,
        }[Coll(a.coll)]
        make(a)

    def _agree(self, a: Arguments) -> None:
        """Raise CollectiveMismatch unless all ranks make the same call. Nobody gets it before all have come."""
        num_bytes = a.count * (_ITEM_BYTES[a.dtype] if a.coll in failures.REDUCING else 1)
        mine = Call(coll=a.coll, op=a.op, dtype=a.dtype, root=a.root, bytes=num_bytes)
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        calls = [torch.empty_like(sent) for _ in range(self._world)]
        self._all.allgather([calls], [sent]).wait()
        for rank, call in enumerate(calls):
            if not torch.equal(call, sent):
                theirs = Call.from_buffer_copy(bytes(call.tolist()))
                raise CollectiveMismatch(
                    f"group {self._name!r}: rank {self._rank} called {failures.describe(mine)}, rank {rank} called "
                    f"{failures.describe(theirs)}. All ranks must make the same calls in the same order."
                )

    def _barrier(self, a: Arguments) -> None:
        pass  # they have all come to agree on it

    def _all_reduce(self, a: Arguments) -> None:
        self._sum(a, a.out)

    def _reduce(self, a: Arguments) -> None:
        total = _bytes(a.in_, a.count * _ITEM_BYTES[a.dtype]).clone()
        self._sum(a, total.data_ptr())
        if a.root == self._rank:
            _bytes(a.out, total.nbytes).copy_(total)

    def _reduce_scatter(self, a: Arguments) -> None:
        num_bytes = a.count * _ITEM_BYTES[a.dtype]
        total = torch.cat([_bytes(a.ins[r], num_bytes) for r in range(self._world)])
        whole = Arguments(coll=Coll.ALL_REDUCE, dtype=a.dtype, op=a.op, root=-1, count=a.count * self._world)
        self._sum(whole, total.data_ptr())
        _bytes(a.out, num_bytes).copy_(total[self._rank * num_bytes : (self._rank + 1) * num_bytes])

    def _broadcast(self, a: Arguments) -> None:
        home = next(i for i, ranks in enumerate(self._machines) if a.root in ranks)
        if home == self._machine:
            root = self._local_ranks.index(a.root)
            self._local(Arguments(coll=Coll.BROADCAST, dtype=a.dtype, root=root, count=a.count, out=a.out))
        parts = _bytes(a.out, a.count).tensor_split(self._num_lanes)
        if self._lane is not None and parts[self._local_rank].numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = home, 0
            self._lane.broadcast([parts[self._local_rank]], options).wait()
        if home != self._machine:
            self._spread(parts)

    def _all_gather(self, a: Arguments) -> None:
        outs = [_bytes(a.outs[r], a.count) for r in range(self._world)]
        self._all.allgather([outs], [_bytes(a.in_, a.count)]).wait()

    def _gather(self, a: Arguments) -> None:
        options = dist.GatherOptions()
        options.rootRank = a.root
        outs = [_bytes(a.outs[r], a.count) for r in range(self._world)] if a.root == self._rank else None
        self._all.gather([outs] if outs else [], [_bytes(a.in_, a.count)], options).wait()

    def _scatter(self, a: Arguments) -> None:
        options = dist.ScatterOptions()
        options.rootRank = a.root
        ins = [_bytes(a.ins[r], a.count) for r in range(self._world)] if a.root == self._rank else None
        self._all.scatter([_bytes(a.out, a.count)], [ins] if ins else [], options).wait()

    def _all_to_all(self, a: Arguments) -> None:
        in_bytes, out_bytes = a.in_bytes[: self._world], a.out_bytes[: self._world]
        sent = torch.cat([_bytes(a.ins[r], n) for r, n in enumerate(in_bytes)])
        came = torch.empty(sum(out_bytes), dtype=torch.uint8)
        self._all.alltoall_base(came, sent, out_bytes, in_bytes, dist.AllToAllOptions()).wait()
        for r, part in enumerate(torch.split(came, out_bytes)):
            _bytes(a.outs[r], part.numel()).copy_(part)

    def _sum(self, a: Arguments, address: int) -> None:
        """Reduce a.count elements at an address over all ranks, in place; every rank gets the same bits.

        Each rank's lane carries 1/L of the bytes, to and from M-1 machines. Sums are taken in the order of machines.
        """
        op = Op.SUM if a.op == Op.AVG else Op(a.op)
        here = {"dtype": a.dtype, "op": op, "root": -1, "count": a.count, "in_": address, "out": address}
        self._local(Arguments(coll=Coll.ALL_REDUCE, **here))
        item = _ITEM_BYTES[a.dtype]
        parts = _bytes(address, a.count * item).view(-1, item).tensor_split(self._num_lanes)
        if self._lane is not None and parts[self._local_rank].numel():
            mine = parts[self._local_rank].view(-1)
            theirs = [torch.empty_like(mine) for _ in self._machines]
            self._lane.allgather([theirs], [mine]).wait()
            _native.reduce_here(
                mine.data_ptr(), [t.data_ptr() for t in theirs], mine.numel() // item, a.dtype, op
            )
        self._spread([part.view(-1) for part in parts])
        if a.op == Op.AVG:
            _bytes(address, a.count * item).view(_DTYPES[a.dtype]).div_(self._world)

    def _spread(self, parts: Any) -> None:
        """Give each part, which its lane's rank has, to all ranks of this machine."""
        for lane, part in enumerate(parts):
            out = part.data_ptr()
            self._local(Arguments(coll=Coll.BROADCAST, dtype=0, root=lane, count=part.numel(), out=out))

    def _local(self, arguments: Arguments) -> None:
        """A collective of this machine's ranks, in shared memory."""
        code = _native.run(self._core(), arguments)
        if code != 0:
            where = f"{self._name} on machine {self._machine}, its ranks {self._local_ranks} here 0 and on,"
            num_ranks = len(self._local_ranks)
            raise failures.error_of(self._core(), code, where, self._local_rank, num_ranks, self._timeout_s)

    def _between_machines(self, error: RuntimeError) -> CommError:
        text = str(error)
        kind = (
            PeerLost
            if _GLOO_LOST.search(text)
            else CollectiveTimeout
            if _GLOO_LATE.search(text)
            else CommError
        )
        return kind(
            f"rank {self._rank}: group {self._name!r}, between its machines {self._machines}: {text}. "
            f"The output of the other machines' ranks may say why; the group cannot go on."
        )


hide_from_dynamo(MachinesGroup, ThreadWork)
