"""What torch.distributed asks of a process group, in terms of the few operations in which our groups differ.

The methods have the names and arguments that torch.distributed calls, both the present ones (all_gather_single) and
those of older releases (_allgather_base). Blocking collectives enter by one door each, whose name ends in an
underscore (all_reduce_), whoever calls: torch, an operator of a compiled graph, a coalesced form. A group that knows a
faster way overrides the door.
"""

import contextlib
import datetime
import errno
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work
from torch.distributed import ProcessGroup, ReduceOp

from numadist import _native
from numadist._native import Coll, Op
from numadist.comm import BACKEND, collective_calls, failures, registry, trace
from numadist.comm.collective_calls import CollectiveCall
from numadist.comm.dtypes import OPS
from numadist.comm.dynamo import hide_from_dynamo
from numadist.comm.fused import AfterSum, finish_sum
from numadist.comm.overloads import overloaded
from numadist.comm.sparse import sum_sparse_
from numadist.comm.tensors import store
from numadist.comm.works import DONE, CollectiveWork, DoneWork, MessageWork, PendingWork
from numadist.errors import CommError

# store, rank, number of ranks, timeout in seconds -> a group over all ranks that meet in the store.
Connect = Callable[[Store, int, int, float], "NumaGroup"]


def is_async(opts: Any) -> bool:
    """Whether torch's options ask for a call in the background.

    Without options, as hooks call a group directly, torch's own default holds: async.
    """
    return opts is None or bool(opts.asyncOp)


def reduction_of(opts: Any, in_place: Sequence[Tensor] = ()) -> Op:
    """The core's reduction; PREMUL_SUM scales the tensors to be reduced in place, and is a sum then."""
    if opts is None:
        return Op.SUM
    if opts.reduceOp == ReduceOp.SUM:
        return Op.SUM  # without a look-up, which takes a microsecond
    name = opts.reduceOp.op
    op = OPS.get(name)
    if op is not None:
        return op
    if name == ReduceOp.PREMUL_SUM:
        for t in in_place:
            store(t, t.detach() * opts.reduceOp.factor)
        return Op.SUM
    raise CommError(f"backend numa has no reduction {name}; it has {[o.name for o in Op]}")


def scaled(opts: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The inputs of a reduction, times the factor of PREMUL_SUM."""
    if opts is None or opts.reduceOp.op != ReduceOp.PREMUL_SUM:
        return tensors
    return [t.detach() * opts.reduceOp.factor for t in tensors]


class CoreGroup(ProcessGroup):
    """The life of a group that has a handle of the core: names, time limit, counters, end by shutdown()."""

    def __init__(self, handle: int, rank: int, world: int, timeout_s: float, store: Store):
        # torch's stubs know only the constructor that makes C++ backends.
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._handle: int | None = handle
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._store = store
        self._name = ""
        self._desc = ""
        self._outstanding: deque[PendingWork] = deque()
        trace.begin(handle, self)

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's GroupName is a str
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """What moves a device's tensors: this group itself, which needs no other object for it."""
        if device.type != "cpu":
            raise CommError(
                f"backend numa moves CPU tensors; group {self._name!r} has none for {device.type}"
            )
        return self

    # C++ asks by these names.
    def setGroupName(self, name: str) -> None:
        self._set_group_name(name)

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._set_group_desc(desc)

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        raise NotImplementedError

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._check(_native.lib.nd_group_set_timeout(self._core(), int(self._timeout_s * 1e9)))

    def get_group_store(self) -> Store:
        return self._store

    def counters(self, reset: bool) -> registry.CommStats:
        s = _native.group_stats(self._core(), reset)
        return registry.CommStats(num_calls=s.num_calls, total_ns=s.total_ns, wait_ns=s.wait_ns)

    def num_running(self) -> int:
        works = list(self._outstanding)
        return sum(isinstance(work, CollectiveWork) and not work.is_completed() for work in works)

    def _get_sequence_number_for_group(self) -> int:
        return self.counters(False).num_calls

    def _set_sequence_number_for_group(self) -> None:
        pass  # the core counts from the group's beginning

    def abort(self) -> None:
        """Make the running and all later calls of every rank fail."""
        self._check(_native.lib.nd_group_abort(self._core()))

    def shutdown(self) -> None:
        """Wait for calls under way, then unmap the segment; a second call does nothing."""
        if self._handle is None:
            return
        for work in self._outstanding:
            with contextlib.suppress(CommError):
                work.wait()
        self._outstanding.clear()
        handle, self._handle = self._handle, None
        registry.remove(self._name)
        trace.collect(handle)
        _native.lib.nd_group_close(handle)

    def _core(self) -> int:
        if self._handle is None:
            raise CommError(
                f"group {self._name!r} was destroyed; make a new one with init_process_group or new_group"
            )
        return self._handle

    def _remember(self, work: PendingWork) -> PendingWork:
        """Keep a work, and so its tensors, until it is done, even if the caller drops it."""
        while self._outstanding and self._outstanding[0].is_completed():
            self._outstanding.popleft()
        self._outstanding.append(work)
        return work

    def _check(self, code: int, t: Tensor | None = None, op: Op | None = None) -> None:
        if code != 0:
            raise self._error(code, [] if t is None else [t], op)

    def _error(self, code: int, tensors: Sequence[Tensor] = (), op: Op | None = None) -> CommError:
        if op is not None and code == -errno.EOPNOTSUPP:
            return CommError(
                f"{op.name} of {tensors[0].dtype} has no meaning; AVG needs floats, BAND, BOR and BXOR integers"
            )
        return failures.error_of(self._core(), code, self._name, self._rank, self._world, self._timeout_s)


class NumaGroup(CoreGroup):
    """torch's collectives and messages. A subclass says how calls are made: _make, _start, _message."""

    def __init__(self, handle: int, rank: int, world: int, timeout_s: float, store: Store, connect: Connect):
        """connect: makes the groups that this one is split in."""
        super().__init__(handle, rank, world, timeout_s, store)
        self._connect = connect
        self._num_splits = 0

    # ---- how a subclass makes calls -------------------------------------------------------------------------

    def _make(self, calls: list[CollectiveCall], result: list[Tensor], op: Op | None) -> None:
        """Make the calls, one after the other, before returning. Raises: CommError."""
        raise NotImplementedError

    def _start(self, calls: list[CollectiveCall], result: list[Tensor], op: Op | None) -> CollectiveWork:
        """Make the calls, one after the other, in the background."""
        raise NotImplementedError

    def _message(self, coll: Coll, t: Tensor, peer: int, tag: int) -> Work:
        """Send or receive in the background; peer -1 receives from anyone."""
        raise NotImplementedError

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the missing ranks within a time of its own; the group stays usable."""
        raise NotImplementedError

    # ---- the doors of blocking collectives ------------------------------------------------------------------

    def all_reduce_(self, t: Tensor, op: Op) -> None:
        """Replace t by its reduction over the group; every rank gets the same bits."""
        if t.is_sparse:
            self._all_reduce_sparse(t, op)
            return
        self._make([collective_calls.in_place(Coll.ALL_REDUCE, t, op)], [t], op)

    def reduce_scatter_(self, out: Tensor, t: Tensor, op: Op) -> None:
        """Write into out this rank's part, an R-th, of the reduction of t over the ranks."""
        self._make([collective_calls.reduce_scatter_single(out, t, op, self._world)], [out], op)

    def all_gather_(self, out: Tensor, t: Tensor) -> None:
        """Write into out everybody's t, one after the other."""
        self._make([collective_calls.all_gather_single(out, t, self._world)], [out], None)

    def all_reduce_fused(self, x: Tensor, out: Tensor, after: AfterSum) -> None:
        """Sum x over the ranks and finish the sum, see numadist.comm.fused; x is only read."""
        total = x.clone()
        self.all_reduce_(total, Op.SUM)
        finish_sum(total, out, after)

    # ---- collectives by torch's names -----------------------------------------------------------------------
    # torch's stubs give most of these a second signature, which only C++ backends need, hence the ignored overrides.

    @overloaded
    def barrier(self, opts: Any = None) -> Work:
        return self._run([collective_calls.barrier()], [], opts)

    @overloaded
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = reduction_of(opts, tensors)
        if is_async(opts) and not any(t.is_sparse for t in tensors):
            calls = [collective_calls.in_place(Coll.ALL_REDUCE, t, op) for t in tensors]
            return self._run(calls, tensors, opts, op)
        for t in tensors:
            self.all_reduce_(t, op)
        return DoneWork(tensors) if is_async(opts) else DONE

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    @overloaded
    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op = reduction_of(opts, tensors)
        calls = [collective_calls.in_place(Coll.REDUCE, t, op, opts.rootRank) for t in tensors]
        return self._run(calls, tensors, opts, op)

    @overloaded
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        calls = [collective_calls.broadcast(t, opts.rootRank) for t in tensors]
        return self._run(calls, tensors, opts)

    @overloaded
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        calls = [collective_calls.all_gather(outs, t) for outs, t in zip(outputs, inputs, strict=True)]
        return self._run(calls, [t for outs in outputs for t in outs], opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        # torch passes outputs[rank][tensor] here, unlike in allgather.
        calls = [
            collective_calls.all_gather([of_rank[i] for of_rank in outputs], t) for i, t in enumerate(inputs)
        ]
        return self._run(calls, [t for outs in outputs for t in outs], opts)

    def all_gather_single(self, output: Tensor, t: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [t], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        pairs = list(zip(outputs, inputs, strict=True))
        if is_async(opts):
            calls = [collective_calls.all_gather_single(out, t, self._world) for out, t in pairs]
            return self._run(calls, outputs, opts)
        for out, t in pairs:
            self.all_gather_(out, t)
        return DONE

    @overloaded
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        op = reduction_of(opts)
        pairs = zip(outputs, [scaled(opts, ins) for ins in inputs], strict=True)
        calls = [collective_calls.reduce_scatter(out, ins, op) for out, ins in pairs]
        return self._run(calls, outputs, opts, op)

    def reduce_scatter_single(self, output: Tensor, t: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [t], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        op = reduction_of(opts)
        pairs = list(zip(outputs, scaled(opts, inputs), strict=True))
        if is_async(opts):
            calls = [collective_calls.reduce_scatter_single(out, t, op, self._world) for out, t in pairs]
            return self._run(calls, outputs, opts, op)
        for out, t in pairs:
            self.reduce_scatter_(out, t, op)
        return DONE

    @overloaded
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        ins = inputs[0] if self._rank == opts.rootRank else []
        return self._run([collective_calls.scatter(outputs[0], ins, opts.rootRank)], outputs, opts)

    @overloaded
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        outs = outputs[0] if self._rank == opts.rootRank else []
        return self._run([collective_calls.gather(outs, inputs[0], opts.rootRank)], outs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._run([collective_calls.all_to_all(outputs, inputs, self._world)], outputs, opts)

    @overloaded
    def all_to_all_single(
        self, output: Tensor, t: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> Work:
        call = collective_calls.all_to_all_single(output, t, out_splits, in_splits, self._world)
        return self._run([call], [output], opts)

    # Names of older torch releases, which functional collectives in C++ still look up. The stubs name their
    # arguments otherwise; C++ passes them by position.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: Any) -> None:
        pass  # torch coalesces by the *_coalesced methods; single calls need no group of their own

    def _end_coalescing(self, device: Any) -> Work:
        return DONE

    # ---- messages and other groups --------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(Coll.SEND, tensors[0], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(Coll.RECV, tensors[0], peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._message(Coll.RECV, tensors[0], -1, tag)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "NumaGroup | None":
        """A group of some of this group's ranks, in the order given; None on the others. Every rank calls it.

        The function torch.distributed.split_group itself refuses to run without an accelerator (torch 2.13).
        """
        self._num_splits += 1
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}/split{self._num_splits}/{ranks[0]}"
        store = PrefixStore(f"split{self._num_splits}/{ranks[0]}", self._store)
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        group = self._connect(store, list(ranks).index(self._rank), len(ranks), timeout_s)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"split of {self._name}")
        return group

    # ---- inside -----------------------------------------------------------------------------------------------

    def _set_group_name(self, name: str) -> None:
        registry.remove(self._name)
        self._name = name
        registry.add(name, self)

    def _run(
        self, calls: list[CollectiveCall], result: list[Tensor], opts: Any, op: Op | None = None
    ) -> Work:
        """Make the calls now, or in the background if torch's options ask for it."""
        if is_async(opts):
            return self._remember(self._start(calls, result, op))
        self._make(calls, result, op)
        return DONE

    def _all_reduce_sparse(self, t: Tensor, op: Op) -> None:
        if op != Op.SUM:
            raise CommError(f"sparse tensors have SUM only, not {op.name}")
        sum_sparse_(t, self._gather_copies)

    def _gather_copies(self, x: Tensor) -> list[Tensor]:
        """Everybody's x, in rank order."""
        outs = [torch.empty_like(x) for _ in range(self._world)]
        self._make([collective_calls.all_gather(outs, x)], [], None)
        return outs


hide_from_dynamo(CoreGroup, NumaGroup, DoneWork, PendingWork, CollectiveWork, MessageWork)
