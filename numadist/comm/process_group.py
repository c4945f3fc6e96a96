"""Backend "numa": a torch ProcessGroup on the shared-memory core.

Blocking calls run on the calling thread without the GIL; async_op=True hands them to the group's worker thread. The
methods have the names and arguments that torch.distributed calls, both the present ones (all_gather_single)
and those of older releases (_allgather_base).
"""

# torch's stubs give each method two overloads, one of which only C++ backends need.
# mypy: disable-error-code="override,assignment"

import contextlib
import datetime
import errno
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from numadist import _native
from numadist._native import Arguments, Coll, Op
from numadist._native_replay import active as recorder
from numadist._native_replay import address_of
from numadist.comm import jobs, members, rows, segment, watch
from numadist.comm.dtypes import CODES, OPS, PLAIN
from numadist.comm.dynamo import hide_from_dynamo
from numadist.comm.fused import all_reduce_fused
from numadist.comm.monitor import monitored_barrier
from numadist.comm.register import BACKEND
from numadist.comm.sparse import sum_sparse_
from numadist.comm.tensors import Outputs, readable
from numadist.comm.work import DONE, DoneWork, Job, MessageWork, PendingWork, TaskWork
from numadist.errors import CommError
from numadist.log import get_logger

log = get_logger(__name__)
_lib = _native.lib
_nd_all_reduce = _lib.nd_all_reduce
_nd_all_reduce_address = address_of(_nd_all_reduce)
BLOCKING = SimpleNamespace(asyncOp=False)

# Open groups by torch's name. pybind does not keep a Python subclass alive for C++, so this does.
_groups: dict[str, "ShmGroup"] = {}


@dataclass(frozen=True)
class CommStats:
    """Counters of a group on this rank."""

    num_calls: int
    total_ns: int
    wait_ns: int  # of total_ns: waiting for peers


class ShmGroup(dist.ProcessGroup):
    """Ranks of one machine that share a segment. One handle of the core, closed by shutdown()."""

    shares_memory = True

    def __init__(
        self,
        handle: int,
        rank: int,
        world: int,
        timeout_s: float,
        store: dist.Store,
    ):
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._handle: int | None = handle
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._store = store
        self._name = ""
        self._desc = ""
        self._outstanding: deque[PendingWork] = deque()
        self._num_monitored = 0
        self._num_splits = 0

    # ---- what torch asks of a group -----------------------------------------------------------------------

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        _groups.pop(self._name, None)
        self._name = name
        _groups[name] = self

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    # C++ asks by these names.
    def setGroupName(self, name: str) -> None:
        self._set_group_name(name)

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._set_group_desc(desc)

    def getGroupDesc(self) -> str:
        return self._desc

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._check(_lib.nd_group_set_timeout(self._core(), int(self._timeout_s * 1e9)))

    def _get_sequence_number_for_group(self) -> int:
        return _native.group_stats(self._core(), False).num_calls

    def _set_sequence_number_for_group(self) -> None:
        pass  # the core counts from the group's beginning

    def _start_coalescing(self, device: Any) -> None:
        pass  # torch coalesces by the *_coalesced methods; single calls need no group of their own

    def _end_coalescing(self, device: Any) -> Work:
        return DONE

    def get_group_store(self) -> dist.Store:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "ShmGroup | None":
        """A group of some of this group's ranks, in the order given; None on the others. Every rank calls it.

        The function torch.distributed.split_group itself refuses to run without an accelerator (torch 2.13).
        """
        self._num_splits += 1
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}/split{self._num_splits}/{ranks[0]}"
        store = dist.PrefixStore(f"split{self._num_splits}/{ranks[0]}", self._store)
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        group = connect(store, list(ranks).index(self._rank), len(ranks), timeout_s)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"split of {self._name}")
        return group

    def abort(self) -> None:
        """Make the running and all later calls of every rank fail."""
        self._check(_lib.nd_group_abort(self._core()))

    def shutdown(self) -> None:
        """Wait for calls under way, then unmap the segment; a second call does nothing."""
        if self._handle is None:
            return
        for work in self._outstanding:
            with contextlib.suppress(CommError):
                work.wait()
        self._outstanding.clear()
        handle, self._handle = self._handle, None
        _groups.pop(self._name, None)
        _lib.nd_group_close(handle)

    def __repr__(self) -> str:
        return f"ShmGroup(name={self._name!r}, rank={self._rank}, world={self._world})"

    # ---- collectives ----------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        return self._run(opts, [Job(Arguments(coll=Coll.BARRIER))], [])

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the missing ranks within a time of its own; the group stays usable."""
        self._num_monitored += 1
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        # Negative tags are ours; a new one each time, so that a late rank does not pass the next barrier.
        tag = -self._num_monitored
        monitored_barrier(self._core(), self._rank, self._world, seconds, wait_all_ranks, tag)

    def all_reduce_(self, t: Tensor, op: Op) -> None:
        """Replace t by its reduction over the group; every rank gets the same bits."""
        # The way of nearly all calls, kept short: decode makes thousands a second of a few microseconds each.
        dtype = PLAIN.get(t.dtype)
        address = t.data_ptr() if t.is_cpu and t.layout is torch.strided else 1
        if dtype is None or address & 7 or not t.is_contiguous() or t.is_neg():
            if (found := recorder()) is not None:
                found.refused = "an all-reduce of other than plain numbers in order"
            self._run(BLOCKING, [jobs.in_place(Coll.ALL_REDUCE, t, op)], [t], op)
            return
        args = self._core(), address, address, t.numel(), dtype, int(op)
        if (found := recorder()) is not None:
            found.note(_nd_all_reduce_address, args, functools.partial(self._fail, t, op))
        code = _nd_all_reduce(*args)
        if code:
            raise self._error(code, [t], op)

    def _fail(self, t: Tensor, op: Op, code: int) -> None:
        raise self._error(code, [t], op)

    def all_reduce_fused(self, x: Tensor, out: Tensor, **epilogue: Any) -> None:
        """all_reduce with bias, residual and norm, see numadist.comm.fused.all_reduce_fused."""
        self._check(all_reduce_fused(self._core(), x, out, **epilogue), x, Op.SUM)

    def reduce_scatter_(self, out: Tensor, x: Tensor) -> None:
        """out = this rank's part, an R-th, of the sum of x over the ranks."""
        if self.shares_memory and rows.are_plain(x, out, self._world):
            self._check(rows.reduce_scatter(self._core(), out, x, self._world), out, Op.SUM)
        else:
            self._run(BLOCKING, [jobs.reduce_scatter_single(out, x, Op.SUM, self._world)], [out], Op.SUM)

    def all_gather_(self, out: Tensor, x: Tensor) -> None:
        """out = everybody's x, one after the other."""
        if self.shares_memory and rows.are_plain(out, x, self._world):
            self._check(rows.all_gather(self._core(), out, x, self._world), out)
        else:
            self._run(BLOCKING, [jobs.all_gather_single(out, x, self._world)], [out])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = self._op(opts, tensors)
        blocking = opts is not None and not opts.asyncOp
        if blocking and len(tensors) == 1 and not tensors[0].is_sparse:
            self.all_reduce_(tensors[0], op)
            return DONE
        if any(t.is_sparse for t in tensors):
            return self._allreduce_sparse(tensors, op)
        if blocking:
            for t in tensors:
                self.all_reduce_(t, op)
            return DONE
        todo = [jobs.in_place(Coll.ALL_REDUCE, t, op) for t in tensors]
        return self._run(opts, todo, tensors, op)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op = self._op(opts, tensors)
        todo = [jobs.in_place(Coll.REDUCE, t, op, opts.rootRank) for t in tensors]
        return self._run(opts, todo, tensors, op)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._run(opts, [jobs.broadcast(t, opts.rootRank) for t in tensors], tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        todo = [jobs.all_gather(outs, t) for outs, t in zip(outputs, inputs, strict=True)]
        return self._run(opts, todo, [t for outs in outputs for t in outs])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        # torch passes outputs[rank][tensor] here, unlike in allgather.
        todo = [jobs.all_gather([of_rank[i] for of_rank in outputs], t) for i, t in enumerate(inputs)]
        return self._run(opts, todo, [t for outs in outputs for t in outs])

    def all_gather_single(self, output: Tensor, t: Tensor, opts: Any = None) -> Work:
        return self._run(opts, [jobs.all_gather_single(output, t, self._world)], [output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        todo = [jobs.all_gather_single(y, t, self._world) for y, t in zip(outputs, inputs, strict=True)]
        return self._run(opts, todo, outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        op = self._op(opts)
        scaled = [self._scaled(opts, ins) for ins in inputs]
        todo = [jobs.reduce_scatter(y, ins, op) for y, ins in zip(outputs, scaled, strict=True)]
        return self._run(opts, todo, outputs, op)

    def reduce_scatter_single(self, output: Tensor, t: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [t], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        op = self._op(opts)
        pairs = zip(outputs, self._scaled(opts, inputs), strict=True)
        todo = [jobs.reduce_scatter_single(y, t, op, self._world) for y, t in pairs]
        return self._run(opts, todo, outputs, op)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        ins = inputs[0] if self._rank == opts.rootRank else []
        return self._run(opts, [jobs.scatter(outputs[0], ins, opts.rootRank)], outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        outs = outputs[0] if self._rank == opts.rootRank else []
        return self._run(opts, [jobs.gather(outs, inputs[0], opts.rootRank)], outs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._run(opts, [jobs.all_to_all(outputs, inputs, self._world, Outputs())], outputs)

    def all_to_all_single(
        self, output: Tensor, t: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> Work:
        job = jobs.all_to_all_single(output, t, out_splits, in_splits, self._world)
        return self._run(opts, [job], [output])

    # Names of older torch releases, which functional collectives in C++ still look up.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- messages ---------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(Coll.SEND, tensors[0], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(Coll.RECV, tensors[0], peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._message(Coll.RECV, tensors[0], -1, tag)

    # ---- inside -------------------------------------------------------------------------------------------

    def _run(self, opts: Any, todo: list[Job], result: list[Tensor], op: Op | None = None) -> Work:
        """Make the calls now, or for async_op hand them to the group's worker."""
        handle = self._core()
        # Without options, as hooks call a group directly, torch's own default holds: async.
        if opts is None or opts.asyncOp:
            work = TaskWork(handle, todo, lambda code: self._error(code, result, op), result)
            return self._remember(work)
        for job in todo:
            code = _native.run(handle, job.arguments)
            if code != 0:
                raise self._error(code, result, op)
            job.store()
        return DONE

    def _remember(self, work: PendingWork) -> PendingWork:
        """Keep a work, and so its tensors, until it is done, even if the caller drops it."""
        while self._outstanding and self._outstanding[0].is_completed():
            self._outstanding.popleft()
        self._outstanding.append(work)
        return work

    def _message(self, coll: Coll, t: Tensor, peer: int, tag: int) -> Work:
        handle, staged = self._core(), Outputs()
        x = readable(t) if coll == Coll.SEND else staged.writable(t)
        code, request = _native.start_message(handle, coll, x.data_ptr(), x.nbytes, CODES[x.dtype], peer, tag)
        if code != 0:
            raise self._error(code)
        return self._remember(MessageWork(handle, request, x, self._error, staged.store))

    def _allreduce_sparse(self, tensors: list[Tensor], op: Op) -> Work:
        if op != Op.SUM:
            raise CommError(f"sparse tensors have SUM only, not {op.name}")
        for t in tensors:
            sum_sparse_(t, self._gathered)
        return DoneWork(tensors)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """Everybody's x, in rank order."""
        outs = [torch.empty_like(x) for _ in range(self._world)]
        self._run(BLOCKING, [jobs.all_gather(outs, x)], [])
        return outs

    def _core(self) -> int:
        if self._handle is None:
            raise CommError(
                f"group {self._name!r} was destroyed; make a new one with init_process_group or new_group"
            )
        return self._handle

    def _check(self, code: int, t: Tensor | None = None, op: Op | None = None) -> None:
        if code != 0:
            raise self._error(code, [] if t is None else [t], op)

    def _error(self, code: int, tensors: Sequence[Tensor] = (), op: Op | None = None) -> CommError:
        if op is not None and code == -errno.EOPNOTSUPP:
            return CommError(
                f"{op.name} of {tensors[0].dtype} has no meaning; AVG needs floats, BAND, BOR and BXOR integers"
            )
        return watch.error_of(self._core(), code, self._name, self._rank, self._world, self._timeout_s)

    def _op(self, opts: Any, in_place: Sequence[Tensor] = ()) -> Op:
        """The core's reduction; PREMUL_SUM scales the tensors to be reduced in place, and is a sum then."""
        if opts is None:
            return Op.SUM
        name = opts.reduceOp.op
        op = OPS.get(name)
        if op is not None:
            return op
        if name == ReduceOp.PREMUL_SUM:
            for t in in_place:
                t.mul_(opts.reduceOp.factor)
            return Op.SUM
        raise CommError(f"backend numa has no reduction {name}; it has {[o.name for o in Op]}")

    def _scaled(self, opts: Any, tensors: list[Tensor]) -> list[Tensor]:
        """The inputs of a reduction, times the factor of PREMUL_SUM."""
        if opts is None or opts.reduceOp.op != ReduceOp.PREMUL_SUM:
            return tensors
        return [t * opts.reduceOp.factor for t in tensors]


hide_from_dynamo(ShmGroup, DoneWork, PendingWork, TaskWork, MessageWork)


def create(options: Any, backend_options: Any) -> ShmGroup:
    """torch's creator function: waits for all ranks of the group. Raises: CommError, ConfigError."""
    import numadist.comm.ops  # noqa: F401  (registers torch.ops.numadist.*)

    rank, world = options.group_rank, options.group_size
    if not 1 <= world <= _native.MAX_WORLD:
        raise CommError(f"backend numa takes 1 to {_native.MAX_WORLD} ranks, this group has {world}")
    group = connect(options.store, rank, world, options.timeout.total_seconds())
    log.debug("rank %d of %d: group %s connected", rank, world, options.group_id)
    return group


def connect(store: dist.Store, rank: int, world: int, timeout_s: float) -> ShmGroup:
    """A group over all ranks that meet in the store under its present prefix."""
    everybody = members.meet(store, rank, world, timeout_s)
    machines = members.machines_of(everybody)
    if len(machines) == 1:
        handle = segment.open_group(store, range(world), rank, everybody, timeout_s)
        return ShmGroup(handle, rank, world, timeout_s, store)
    from numadist.comm.machines import MachinesGroup

    mine = next(ranks for ranks in machines if rank in ranks)
    handle = segment.open_group(store, mine, rank, [everybody[r] for r in mine], timeout_s)
    return MachinesGroup(handle, rank, machines, timeout_s, store)


def find(name: str) -> ShmGroup:
    """The open group of a name. Raises: CommError."""
    try:
        return _groups[name]
    except KeyError:
        raise CommError(
            f"no group {name!r} of backend numa in this process; open ones: {sorted(_groups)}"
        ) from None


def num_open() -> int:
    """Collectives of all groups that async_op=True started and that are still under way."""
    return sum(
        isinstance(work, TaskWork) and not work.is_completed()
        for group in _groups.values()
        for work in list(group._outstanding)
    )


def stats(group: dist.ProcessGroup | None = None, reset: bool = False) -> CommStats:
    """Counters of a group (default: the default group) since the last reset; times are taken from the first one on."""
    pg = group if group is not None else torch.distributed.group.WORLD
    if not isinstance(pg, ShmGroup):
        raise CommError(f"only groups of backend numa have counters, got {pg!r}")
    s = _native.group_stats(pg._core(), reset)
    return CommStats(num_calls=s.num_calls, total_ns=s.total_ns, wait_ns=s.wait_ns)
