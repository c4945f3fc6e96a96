"""The native core by ctypes: loads _core.so, checks its ABI, turns -errno into errors.

The only file that knows C types; csrc/nd_core.h is the manual of every function here.
"""

import ctypes
import enum
import errno
import os
from collections.abc import Iterable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_size_t, c_uint64, c_void_p
from pathlib import Path

from numadist.config import config
from numadist.errors import ConfigError, NativeError

ABI_VERSION = 17  # ND_ABI_VERSION
MAX_WORLD = 512  # ND_MAX_WORLD
NODE_WORDS = 16  # ND_NODE_WORDS
HISTORY = 16  # ND_HISTORY
# As nd_limit_isa takes them, better ones later.
_OF_X86 = "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"
ISAS = "portable", *{"x86_64": _OF_X86, "aarch64": ("neon_dotprod",)}.get(os.uname().machine, ())


class Dtype(enum.IntEnum):
    """NdDtype. Codes from 64 on have no reductions: they only say which dtype a copy moves."""

    F32 = 0
    F64 = 1
    F16 = 2
    BF16 = 3
    I8 = 4
    U8 = 5
    I16 = 6
    U16 = 7
    I32 = 8
    U32 = 9
    I64 = 10
    U64 = 11
    BOOL = 12
    OTHER = 64


class Op(enum.IntEnum):
    """NdOp."""

    SUM = 0
    AVG = 1
    PROD = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class Coll(enum.IntEnum):
    """NdColl."""

    BARRIER = 1
    ALL_REDUCE = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    BROADCAST = 5
    SCATTER = 6
    GATHER = 7
    REDUCE = 8
    ALL_TO_ALL = 9
    CONNECT = 10
    SEND = 11
    RECV = 12
    ALL_REDUCE_FUSED = 13


class _Tuning(ctypes.Structure):
    _fields_ = [("one_shot_bytes", c_uint64)]


class _Options(ctypes.Structure):
    _fields_ = [("timeout_ns", c_uint64), ("spin_ns", c_uint64)]


class Norm(enum.IntEnum):
    """NdNorm."""

    NONE = 0
    RMS = 1
    LAYER = 2


class Epilogue(ctypes.Structure):
    """NdEpilogue: what follows the sum in nd_all_reduce_fused."""

    _fields_ = [
        ("cols", c_size_t),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("norm_bias", c_void_p),
        ("norm", c_int32),
        ("eps", ctypes.c_float),
    ]


class Call(ctypes.Structure):
    """NdCall: one rank's side of a collective."""

    _fields_ = [
        ("coll", ctypes.c_uint8),
        ("op", ctypes.c_uint8),
        ("dtype", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8),
        ("root", c_int32),
        ("bytes", c_uint64),
    ]


class Report(ctypes.Structure):
    """NdReport: why a group failed."""

    _fields_ = [
        ("code", c_int32),
        ("reporter", c_int32),
        ("peer", c_int32),
        ("peer_pid", c_int32),
        ("seq", c_uint64),
        ("mine", Call),
        ("theirs", Call),
    ]


class Stats(ctypes.Structure):
    """NdStats of one group."""

    _fields_ = [("num_calls", c_uint64), ("total_ns", c_uint64), ("wait_ns", c_uint64)]


_NodeSet = c_uint64 * NODE_WORDS
FOREVER = 2**64 - 1  # ND_FOREVER


class _Team(ctypes.Structure):
    """NdTeam."""

    _fields_ = [("parallel", c_void_p), ("thread_index", c_void_p), ("num_threads", c_void_p)]


class Arguments(ctypes.Structure):
    """NdArguments: a collective as data. What it points to must stay alive until the call is done."""

    _fields_ = [
        ("coll", c_int32),
        ("dtype", c_int32),
        ("op", c_int32),
        ("root", c_int32),
        ("count", c_size_t),
        ("in_", c_void_p),
        ("out", c_void_p),
        ("ins", POINTER(c_void_p)),
        ("outs", POINTER(c_void_p)),
        ("in_bytes", POINTER(c_size_t)),
        ("out_bytes", POINTER(c_size_t)),
    ]


# Arguments after the handle; every function returns 0 or -errno.
_PTR, _PTRS = c_void_p, POINTER(c_void_p)
_WORD = c_void_p  # an integer of a quick call: ctypes takes five times longer to make a size_t of it
_GROUP_FUNCTIONS: dict[str, list] = {
    "nd_group_connect": [POINTER(c_int32)],
    "nd_group_close": [],
    "nd_group_set_timeout": [c_uint64],
    "nd_group_abort": [],
    "nd_group_report": [POINTER(Report)],
    "nd_group_peers": [POINTER(ctypes.c_int8)],
    "nd_group_history": [POINTER(Call)],
    "nd_group_stats": [c_int, POINTER(Stats)],
    "nd_all_reduce_fused": [_PTR, _PTR, c_size_t, c_int, POINTER(Epilogue)],
    "nd_run": [POINTER(Arguments)],
    "nd_task_start": [POINTER(Arguments), POINTER(c_void_p)],
    "nd_task_wait": [c_void_p, c_uint64, POINTER(c_int)],
    "nd_task_free": [c_void_p],
    "nd_send_start": [_PTR, c_size_t, c_int, c_int, c_int, c_int, POINTER(c_void_p)],
    "nd_recv_start": [_PTR, c_size_t, c_int, c_int, c_int, c_int, POINTER(c_void_p)],
    "nd_message_wait": [c_void_p, c_uint64],
    "nd_message_poll": [c_void_p, c_uint64],
    "nd_message_test": [c_void_p],
    "nd_message_free": [c_void_p],
    "nd_barrier": [],
    "nd_all_reduce": [_PTR, _PTR, _WORD, _WORD, _WORD],
    "nd_all_gather": [_PTR, _PTRS, _WORD, _WORD],
    "nd_reduce_scatter": [_PTRS, _PTR, _WORD, _WORD, _WORD],
    "nd_broadcast": [_PTR, _WORD, _WORD, _WORD],
    "nd_scatter": [_PTRS, _PTR, c_size_t, c_int, c_int],
    "nd_gather": [_PTR, _PTRS, c_size_t, c_int, c_int],
    "nd_reduce": [_PTR, _PTR, c_size_t, c_int, c_int, c_int],
    "nd_all_to_all": [_PTRS, POINTER(c_size_t), _PTRS, POINTER(c_size_t), c_int],
}
_OTHER_FUNCTIONS: dict[str, list] = {
    "nd_abi_version": [],
    "nd_limit_isa": [c_char_p],
    "nd_map": [c_size_t, _PTRS],
    "nd_unmap": [_PTR, c_size_t],
    "nd_bind": [_PTR, c_size_t, POINTER(c_uint64)],
    "nd_bound_nodes": [_PTR, POINTER(c_uint64)],
    "nd_advise_huge": [_PTR, c_size_t],
    "nd_touch": [_PTR, c_size_t],
    "nd_page_nodes": [_PTR, c_size_t, POINTER(c_int32)],
    "nd_message_source": [c_void_p, POINTER(c_uint64), POINTER(c_int)],
    "nd_reduce_local": [c_int, _PTR, _PTRS, c_int, c_size_t, c_int, c_int],
    "nd_team_use": [POINTER(_Team)],
    "nd_team_form": [POINTER(c_int), POINTER(c_int)],
    "nd_skinny_linear": [c_int, _PTR, _PTR, _PTR, _PTR, c_size_t, c_size_t, c_size_t, c_size_t],
    "nd_segment_create": [c_int, c_uint64, POINTER(_Tuning), POINTER(c_uint64), POINTER(c_int)],
    "nd_group_open": [c_int, c_int, c_int, c_uint64, POINTER(_Options), _PTRS],
}


def _load() -> ctypes.CDLL:
    path = Path(__file__).with_name("_core.so")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(
            f"cannot load the native core: {error}. Build it with `pip install -e .` "
            f"or `python setup.py build_ext --inplace` in the source tree."
        ) from None
    for name, arguments in _OTHER_FUNCTIONS.items():
        getattr(lib, name).argtypes = arguments
    if lib.nd_abi_version() != ABI_VERSION:
        raise NativeError(
            f"{path} has ABI {lib.nd_abi_version()}, this Python code needs {ABI_VERSION}: rebuild it."
        )
    for name, arguments in _GROUP_FUNCTIONS.items():
        getattr(lib, name).argtypes = [c_void_p, *arguments]
    lib.nd_isa_name.restype = c_char_p
    lib.nd_segment_bytes.restype = c_size_t
    limit = config().max_isa
    if limit and lib.nd_limit_isa(limit.encode()) != 0:
        raise ConfigError(f"NUMADIST_MAX_ISA is {limit!r}, which is none of {', '.join(ISAS)}")
    return lib


lib = _load()


# Linux has two names for this number, and which of them errno.errorcode has is an accident of its making.
_ERRNO_NAMES = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP"}


def errno_name(number: int) -> str:
    """The manual's name of an error number, or the number."""
    return _ERRNO_NAMES.get(number, str(number))


def check(code: int, what: str) -> None:
    """Raise NativeError for a negative errno, named as in nd_core.h; `what` says what was asked."""
    if code < 0:
        raise NativeError(f"{what}: {errno_name(-code)} ({os.strerror(-code)})")


def pointers(addresses: Iterable[int]) -> ctypes.Array:
    """A C array of addresses."""
    values = list(addresses)
    return (c_void_p * len(values))(*values)


def sizes(values: Sequence[int]) -> ctypes.Array:
    """A C array of size_t."""
    return (c_size_t * len(values))(*values)


def node_set(nodes: Iterable[int]) -> ctypes.Array:
    """Nodes as the kernel's bit mask. Raises: NativeError above 1023."""
    words = _NodeSet()
    for node in nodes:
        if not 0 <= node < 64 * NODE_WORDS:
            raise NativeError(f"memory node {node}: the kernel numbers nodes from 0 to {64 * NODE_WORDS - 1}")
        words[node // 64] |= 1 << (node % 64)
    return words


# ---- memory ----------------------------------------------------------------------------------------------


def map_memory(num_bytes: int) -> int:
    """Address of fresh zero pages. Raises: NativeError."""
    address = c_void_p()
    check(lib.nd_map(num_bytes, byref(address)), f"map {num_bytes} bytes")
    return address.value or 0


def unmap_memory(address: int, num_bytes: int) -> None:
    check(lib.nd_unmap(address, num_bytes), f"unmap {num_bytes} bytes")


def bind_memory(address: int, num_bytes: int, nodes: Iterable[int]) -> int:
    """mbind(MPOL_BIND); 0 or -errno, since the caller knows what it bound."""
    return lib.nd_bind(address, num_bytes, node_set(nodes))


def bound_nodes(address: int) -> frozenset[int]:
    """The nodes the kernel keeps for the page at an address; empty without a policy."""
    words = _NodeSet()
    check(lib.nd_bound_nodes(address, words), "read the memory policy")
    return frozenset(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def advise_huge(address: int, num_bytes: int) -> int:
    """madvise(MADV_HUGEPAGE); 0 or -errno (-EINVAL: a kernel without huge pages)."""
    return lib.nd_advise_huge(address, num_bytes)


def touch_memory(address: int, num_bytes: int) -> int:
    """Fault in all pages for writing; 0 or -errno."""
    return lib.nd_touch(address, num_bytes)


def num_pages(address: int, num_bytes: int) -> int:
    """Pages a range lies on, wholly or in part."""
    page = os.sysconf("SC_PAGESIZE")
    return 0 if num_bytes == 0 else (address + num_bytes - 1) // page - address // page + 1


def page_nodes(address: int, num_bytes: int) -> list[int]:
    """Node of every page of a range; negative errno where there is none: not yet touched."""
    nodes = (c_int32 * num_pages(address, num_bytes))()
    check(lib.nd_page_nodes(address, num_bytes, nodes), f"ask where {num_bytes} bytes are")
    return list(nodes)


# ---- reductions ------------------------------------------------------------------------------------------


def supported_isas() -> list[str]:
    """ISA variants this CPU runs and NUMADIST_MAX_ISA allows, best first; the last is "portable"."""
    names: list[str] = []
    while (name := lib.nd_isa_name(len(names))) is not None:
        names.append(name.decode())
    return names


def reduce_local(isa: str, dst: int, srcs: Sequence[int], count: int, dtype: Dtype, op: Op) -> None:
    """dst = srcs[0] op srcs[1] op ... by one ISA's kernel (addresses). Raises: NativeError."""
    index = supported_isas().index(isa)
    code = lib.nd_reduce_local(index, dst, pointers(srcs), len(srcs), count, dtype, op)
    check(code, f"{op.name} of {dtype.name} by {isa}")


def reduce_here(dst: int, srcs: Sequence[int], count: int, dtype: int, op: Op) -> None:
    """reduce_local by this CPU's best kernel."""
    code = lib.nd_reduce_local(0, dst, pointers(srcs), len(srcs), count, dtype, op)
    check(code, f"{op.name} of {Dtype(dtype).name}")


def can_reduce(dtype: int, op: int) -> bool:
    """Whether the reduction has a meaning: AVG is for floats, BAND, BOR and BXOR for integers."""
    return lib.nd_reduce_local(0, None, pointers([0]), 1, 0, dtype, op) == 0


def memory(address: int, num_bytes: int) -> ctypes.Array:
    """Memory as an object with Python's buffer interface; it does not keep what lies there alive."""
    return (ctypes.c_uint8 * num_bytes).from_address(address)


# ---- groups ----------------------------------------------------------------------------------------------


def _node_masks(nodes: Sequence[Iterable[int]] | None) -> ctypes.Array | None:
    if nodes is None:
        return None
    return (c_uint64 * (len(nodes) * NODE_WORDS))(*(word for rank in nodes for word in node_set(rank)))


def create_segment(world: int, nonce: int, one_shot_bytes: int, nodes: Sequence[Iterable[int]] | None) -> int:
    """fd of a sealed memfd for `world` ranks, part r bound to nodes[r]. Raises: OSError with the errno."""
    fd = c_int(-1)
    masks = _node_masks(nodes)
    code = lib.nd_segment_create(world, nonce, byref(_Tuning(one_shot_bytes)), masks, byref(fd))
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    return fd.value


def open_group(fd: int, rank: int, world: int, nonce: int, timeout_ns: int, spin_ns: int) -> int:
    """Handle of a group. Raises: OSError with the errno (EPROTO: not the segment of this group)."""
    handle = c_void_p()
    code = lib.nd_group_open(fd, rank, world, nonce, byref(_Options(timeout_ns, spin_ns)), byref(handle))
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    return handle.value or 0


def connect_group(handle: int, pids: Sequence[int]) -> int:
    """nd_group_connect; its code. pids: the processes of the ranks."""
    return lib.nd_group_connect(handle, (c_int32 * len(pids))(*pids))


def group_report(handle: int) -> Report:
    report = Report()
    check(lib.nd_group_report(handle, byref(report)), "read the report of a group")
    return report


def group_peers(handle: int, world: int) -> list[int]:
    """Per rank 1 arrived, 0 alive but not arrived, -1 dead; as of the group's failure."""
    state = (ctypes.c_int8 * world)()
    check(lib.nd_group_peers(handle, state), "read the peers of a group")
    return list(state)


def group_history(handle: int) -> list[Call]:
    """The last calls of this rank, oldest first."""
    calls = (Call * HISTORY)()
    count = lib.nd_group_history(handle, calls)
    return list(calls[: max(count, 0)])


def group_stats(handle: int, reset: bool) -> Stats:
    stats = Stats()
    check(lib.nd_group_stats(handle, reset, byref(stats)), "read the counters of a group")
    return stats


def run(handle: int, arguments: Arguments) -> int:
    """Make a collective and wait for it; its code."""
    return lib.nd_run(handle, byref(arguments))


def start(handle: int, arguments: Arguments) -> int:
    """Queue a collective on the group's worker thread; a task. Raises: NativeError."""
    task = c_void_p()
    check(lib.nd_task_start(handle, byref(arguments), byref(task)), "start a collective in the background")
    return task.value or 0


def wait_task(handle: int, task: int, timeout_ns: int) -> int | None:
    """The code of a task when it is done (then the task is freed); None: still running."""
    code = c_int()
    if lib.nd_task_wait(handle, task, timeout_ns, byref(code)) != 0:
        return None
    check(lib.nd_task_free(handle, task), "free a finished task")
    return code.value


def start_message(
    handle: int, coll: Coll, address: int, num_bytes: int, dtype: int, peer: int, tag: int
) -> tuple[int, int]:
    """(code, request) of a send or receive in the background; peer -1 receives from anyone."""
    request = c_void_p()
    function = lib.nd_send_start if coll == Coll.SEND else lib.nd_recv_start
    code = function(handle, address, num_bytes, dtype, peer, tag, 1, byref(request))
    return code, request.value or 0


def message_source(request: int) -> tuple[int, int, int]:
    """(rank that sent it, bytes that came, code of their dtype) of a finished receive."""
    num_bytes, dtype = c_uint64(), c_int()
    source = lib.nd_message_source(request, byref(num_bytes), byref(dtype))
    return source, num_bytes.value, dtype.value


def all_reduce_fused(handle: int, in_: int, out: int, num_rows: int, dtype: int, epilogue: Epilogue) -> int:
    """nd_all_reduce_fused; its code."""
    return lib.nd_all_reduce_fused(handle, in_, out, num_rows, dtype, byref(epilogue))


# ---- the program's OpenMP threads ------------------------------------------------------------------------


class _LoadedFrom(ctypes.Structure):
    """Dl_info."""

    _fields_ = [("path", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p)]


def use_openmp() -> str:
    """Take the OpenMP runtime the program has loaded globally, as torch does; path of its library, or "".

    Call it once and before other functions of this section; import torch first.
    """
    program = ctypes.CDLL(None)
    try:
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        entries = [ctypes.cast(getattr(program, name), c_void_p) for name in names]
    except AttributeError:
        return ""
    check(lib.nd_team_use(byref(_Team(*entries))), "use the program's OpenMP threads")
    found = _LoadedFrom()
    program.dladdr(entries[0], byref(found))
    return os.fsdecode(found.path or b"")


def form_team() -> tuple[int, int]:
    """(threads of an empty region, how many of them no earlier call has seen)."""
    threads, fresh = c_int(), c_int()
    lib.nd_team_form(byref(threads), byref(fresh))
    return threads.value, fresh.value
