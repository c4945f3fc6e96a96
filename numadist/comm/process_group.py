"""Backend "numa": a torch ProcessGroup on the shared-memory core.

Every collective is complete when its method returns; async_op=True gives a finished Work with a future. The
methods have the names and arguments that torch.distributed calls, both the present ones (all_gather_single)
and those of older releases (_allgather_base).
"""

# torch's stubs give each method two overloads, one of which only C++ backends need.
# mypy: disable-error-code="override,assignment"

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from numadist import _native
from numadist._native import Op, pointers
from numadist.comm import segment, watch
from numadist.comm.dtypes import CODES, OPS, REDUCIBLE
from numadist.comm.register import BACKEND
from numadist.comm.tensors import Outputs, readable, same_dtype_and_size
from numadist.comm.work import DONE, finished
from numadist.errors import CommError
from numadist.log import get_logger

log = get_logger(__name__)
_lib = _native.lib

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

    def __init__(self, handle: int, rank: int, world: int, timeout_s: float):
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._handle: int | None = handle
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._name = ""
        self._desc = ""

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
        pass  # every call is complete at once

    def _end_coalescing(self, device: Any) -> Work:
        return DONE

    def abort(self) -> None:
        """Make the running and all later calls of every rank fail."""
        self._check(_lib.nd_group_abort(self._core()))

    def shutdown(self) -> None:
        """Unmap the segment; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _groups.pop(self._name, None)
            _lib.nd_group_close(handle)

    def __repr__(self) -> str:
        return f"ShmGroup(name={self._name!r}, rank={self._rank}, world={self._world})"

    # ---- collectives --------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        self._check(_lib.nd_barrier(self._core()))
        return finished(opts, [])

    def all_reduce_(self, t: Tensor, op: Op) -> None:
        """Replace t by its reduction over the group; every rank gets the same bits."""
        outputs = Outputs()
        x = outputs.writable(t, keep=True)
        dtype, count = self._reduction(x, op)
        self._check(_lib.nd_all_reduce(self._core(), x.data_ptr(), x.data_ptr(), count, dtype, op), t, op)
        outputs.store()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = self._op(opts)
        for t in tensors:
            self.all_reduce_(t, op)
        return finished(opts, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op = self._op(opts)
        for t in tensors:
            outputs = Outputs()
            x = outputs.writable(t, keep=True)
            dtype, count = self._reduction(x, op)
            root = opts.rootRank
            self._check(
                _lib.nd_reduce(self._core(), x.data_ptr(), x.data_ptr(), count, dtype, op, root), t, op
            )
            outputs.store()
        return finished(opts, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        for t in tensors:
            outputs = Outputs()
            x = outputs.writable(t, keep=True)
            self._check(
                _lib.nd_broadcast(self._core(), x.data_ptr(), x.nbytes, CODES[x.dtype], opts.rootRank)
            )
            if opts.rootRank != self._rank:
                outputs.store()
        return finished(opts, tensors)

    def _all_gather(self, outs: list[Tensor], t: Tensor) -> None:
        """outs[r] = rank r's t."""
        x, outputs = readable(t), Outputs()
        same_dtype_and_size("all_gather", outs, x.dtype, x.numel())
        results = [outputs.writable(out) for out in outs]
        addresses = pointers(out.data_ptr() for out in results)
        self._check(_lib.nd_all_gather(self._core(), x.data_ptr(), addresses, x.nbytes, CODES[x.dtype]))
        outputs.store()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        for outs, t in zip(outputs, inputs, strict=True):
            self._all_gather(outs, t)
        return finished(opts, [t for outs in outputs for t in outs])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        # torch passes outputs[rank][tensor] here, unlike in allgather.
        for i, t in enumerate(inputs):
            self._all_gather([of_rank[i] for of_rank in outputs], t)
        return finished(opts, [t for outs in outputs for t in outs])

    def all_gather_single(self, output: Tensor, t: Tensor, opts: Any = None) -> Work:
        outputs = Outputs()
        whole = outputs.writable(output)
        self._all_gather(self._parts("all_gather_into_tensor", whole, t.numel()), t)
        outputs.store()
        return finished(opts, [output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        for output, t in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, t, opts)
        return finished(opts, outputs)

    def _reduce_scatter(self, output: Tensor, ins: list[Tensor], op: Op) -> None:
        """output = reduction over ranks of their ins[my rank]."""
        outputs = Outputs()
        same_dtype_and_size("reduce_scatter", ins, output.dtype, output.numel())
        y, xs = outputs.writable(output), [readable(t) for t in ins]
        dtype, count = self._reduction(y, op)
        addresses = pointers(x.data_ptr() for x in xs)
        self._check(
            _lib.nd_reduce_scatter(self._core(), addresses, y.data_ptr(), count, dtype, op), output, op
        )
        outputs.store()

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        for output, ins in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, ins, self._op(opts))
        return finished(opts, outputs)

    def reduce_scatter_single(self, output: Tensor, t: Tensor, opts: Any = None) -> Work:
        parts = self._parts("reduce_scatter_tensor", readable(t), output.numel())
        self._reduce_scatter(output, parts, self._op(opts))
        return finished(opts, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        for output, t in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, t, opts)
        return finished(opts, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        staged, root = Outputs(), opts.rootRank
        y = staged.writable(outputs[0])
        ins = [readable(t) for t in inputs[0]] if self._rank == root else []
        same_dtype_and_size("scatter", ins, y.dtype, y.numel())
        addresses = pointers(x.data_ptr() for x in ins)
        self._check(_lib.nd_scatter(self._core(), addresses, y.data_ptr(), y.nbytes, CODES[y.dtype], root))
        staged.store()
        return finished(opts, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        staged, root, x = Outputs(), opts.rootRank, readable(inputs[0])
        outs = outputs[0] if self._rank == root else []
        same_dtype_and_size("gather", outs, x.dtype, x.numel())
        results = [staged.writable(t) for t in outs]
        addresses = pointers(t.data_ptr() for t in results)
        self._check(_lib.nd_gather(self._core(), x.data_ptr(), addresses, x.nbytes, CODES[x.dtype], root))
        staged.store()
        return finished(opts, outs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        staged, xs = Outputs(), [readable(t) for t in inputs]
        ys = [staged.writable(t) for t in outputs]
        if not len(xs) == len(ys) == self._world:
            raise CommError(f"all_to_all: {len(xs)} inputs and {len(ys)} outputs for {self._world} ranks")
        if len(dtypes := {t.dtype for t in xs + ys}) != 1:
            raise CommError(f"all_to_all: tensors of several dtypes: {sorted(map(str, dtypes))}")
        code = _lib.nd_all_to_all(
            self._core(),
            pointers(x.data_ptr() for x in xs),
            _native.sizes([x.nbytes for x in xs]),
            pointers(y.data_ptr() for y in ys),
            _native.sizes([y.nbytes for y in ys]),
            CODES[xs[0].dtype],
        )
        self._check(code)
        staged.store()
        return finished(opts, outputs)

    def all_to_all_single(
        self, output: Tensor, t: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> Work:
        """Splits count rows (dimension 0); an empty list is an even split."""
        staged = Outputs()
        y, x = staged.writable(output), readable(t)
        self.alltoall(self._rows("output", y, out_splits), self._rows("input", x, in_splits), opts)
        staged.store()
        return finished(opts, [output])

    # Names of older torch releases, which functional collectives in C++ still look up.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- inside -------------------------------------------------------------------------------------------

    def _core(self) -> int:
        if self._handle is None:
            raise CommError(
                f"group {self._name!r} was destroyed; make a new one with init_process_group or new_group"
            )
        return self._handle

    def _check(self, code: int, t: Tensor | None = None, op: Op | None = None) -> None:
        if code == 0:
            return
        if t is not None and op is not None and code == -_native.errno.EOPNOTSUPP:
            raise CommError(
                f"{op.name} of {t.dtype} has no meaning; AVG needs floats, BAND, BOR and BXOR integers"
            )
        raise watch.error_of(self._core(), code, self._name, self._rank, self._world, self._timeout_s)

    def _op(self, opts: Any) -> Op:
        if opts is None:
            return Op.SUM
        op = OPS.get(opts.reduceOp.op)
        if op is None:
            raise CommError(
                f"backend numa has no reduction {opts.reduceOp.op}; it has {[o.name for o in Op]}"
            )
        return op

    def _reduction(self, x: Tensor, op: Op) -> tuple[int, int]:
        """(the core's dtype, number of its elements) of a tensor to reduce."""
        code, width = REDUCIBLE.get(x.dtype, (None, 0))
        if code is None:
            raise CommError(
                f"backend numa cannot reduce {x.dtype}; convert it, or gather and reduce yourself"
            )
        if width == 2 and op not in (Op.SUM, Op.AVG):
            raise CommError(f"{op.name} of {x.dtype} has no meaning here; complex numbers have SUM and AVG")
        return code, x.numel() * width

    def _parts(self, what: str, whole: Tensor, numel: int) -> list[Tensor]:
        """A contiguous tensor cut in one flat part of `numel` elements per rank."""
        if whole.numel() != numel * self._world:
            raise CommError(
                f"{what}: the large tensor has {whole.numel()} elements, the small one {numel} on each of "
                f"{self._world} ranks; the large one must have exactly as many as all small ones"
            )
        return list(whole.view(-1).split(numel)) if numel else [whole.view(-1)] * self._world

    def _rows(self, what: str, t: Tensor, splits: list[int]) -> list[Tensor]:
        if not splits:
            if t.dim() == 0 or t.size(0) % self._world:
                raise CommError(
                    f"all_to_all_single: {what} {list(t.shape)} does not split into {self._world} parts"
                )
            splits = [t.size(0) // self._world] * self._world
        if len(splits) != self._world or sum(splits) != t.size(0):
            raise CommError(f"all_to_all_single: {what} splits {splits} do not add up to {t.size(0)} rows")
        return list(t.split(splits))


def create(options: Any, backend_options: Any) -> ShmGroup:
    """torch's creator function: waits for all ranks of the group. Raises: CommError, ConfigError."""
    import numadist.comm.ops  # noqa: F401  (registers torch.ops.numadist.*)

    rank, world = options.group_rank, options.group_size
    if not 1 <= world <= _native.MAX_WORLD:
        raise CommError(f"backend numa takes 1 to {_native.MAX_WORLD} ranks, this group has {world}")
    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(world))
    handle = segment.open_group(options.store, rank, world, timeout_s, ranks)
    log.debug("rank %d of %d: group %s connected", rank, world, options.group_id)
    return ShmGroup(handle, rank, world, timeout_s)


def find(name: str) -> ShmGroup:
    """The open group of a name. Raises: CommError."""
    try:
        return _groups[name]
    except KeyError:
        raise CommError(
            f"no group {name!r} of backend numa in this process; open ones: {sorted(_groups)}"
        ) from None


def stats(group: dist.ProcessGroup | None = None, reset: bool = False) -> CommStats:
    """Counters of a group (default: the default group) since it began or since the last reset."""
    pg = group if group is not None else torch.distributed.group.WORLD
    if not isinstance(pg, ShmGroup):
        raise CommError(f"only groups of backend numa have counters, got {pg!r}")
    s = _native.group_stats(pg._core(), reset)
    return CommStats(num_calls=s.num_calls, total_ns=s.total_ns, wait_ns=s.wait_ns)
