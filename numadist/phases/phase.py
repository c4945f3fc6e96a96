"""`with numadist.phase("decode")`: the same weights, another number of threads, in microseconds.

A switch sets the thread count and forms the new team at once, so that its cost is known and no operator pays it.
Intel's and LLVM's OpenMP keep the threads of the larger team (KMP_HOT_TEAMS_MODE=1). libgomp, which torch brings,
ends surplus threads and starts new ones when the team grows again: see docs/phases.md. Thread counts belong to the
thread that calls, and so does everything here but the plan.
"""

import contextlib
import enum
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from numadist import _native
from numadist.comm.registry import num_open
from numadist.config import config
from numadist.errors import PlanError
from numadist.log import get_logger
from numadist.phases.plan import PlanPair, RankPlan, load_plan
from numadist.topology.cpuset import parse_list

log = get_logger(__name__)


class Phase(str, enum.Enum):
    """What a model does: read prompts or decode."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class PhaseStats:
    """Switches of this thread. threads_created: counted by the threads themselves as they first run."""

    switches: int = 0
    total_ns: int = 0
    threads_created: int = 0
    runtime: str = ""  # file name of the OpenMP library


class _Thread(threading.local):
    """The phase of one thread."""

    current: Phase | None = None
    stats = PhaseStats()
    formed = False


_thread = _Thread()
_plan: tuple[RankPlan, RankPlan] | None = None
_plan_read = False


def use_plan(plan: PlanPair | None, rank: int = 0) -> None:
    """The plan of this process for switches to come; None: phases change nothing.

    numarun --plan makes this call needless. Raises: PlanError for a rank the plan does not have.
    """
    global _plan, _plan_read
    if plan is not None and not 0 <= rank < len(plan.prefill.ranks):
        raise PlanError(f"rank {rank} of a plan for {len(plan.prefill.ranks)} ranks")
    _plan = None if plan is None else (plan.prefill.ranks[rank], plan.decode.ranks[rank])
    _plan_read = True


def current_phase() -> Phase | None:
    """This thread's phase; None: outside."""
    return _thread.current


def phase_stats() -> PhaseStats:
    """What this thread's switches were and cost."""
    return replace(_thread.stats, runtime=_openmp())


@contextlib.contextmanager
def phase(name: str | Phase) -> Iterator[None]:
    """Run the block with the thread count of a phase, and what follows as before.

    Raises: PlanError while a collective of backend numa is under way, or for a name that is no phase.
    """
    before, threads = _thread.current, torch.get_num_threads()
    switch_phase(name)
    try:
        yield
    finally:
        _set(before, threads)


def switch_phase(name: str | Phase) -> None:
    """Enter a phase and stay there; nothing happens in a phase that is the current one. Raises: as `phase`."""
    try:
        wanted = Phase(name)
    except ValueError:
        raise PlanError(f"no phase {name!r}; there are {', '.join(p.value for p in Phase)}") from None
    if wanted is _thread.current:
        return
    if num_open():
        raise PlanError(
            f"cannot switch to {wanted.value}: {num_open()} collectives of this process are under way; wait() for "
            "their works first"
        )
    plan = _read_plan()
    threads = torch.get_num_threads()
    if plan is not None:
        threads = plan[wanted is Phase.DECODE].threads
    _set(wanted, threads)


def _set(wanted: Phase | None, threads: int) -> None:
    stats, begin = _thread.stats, time.perf_counter_ns()
    created = 0
    if (
        not _thread.formed
    ):  # threads that exist already are no work of ours; a first look also makes torch's defaults
        torch.get_num_threads()
        _form()
        _thread.formed = True
        begin = time.perf_counter_ns()
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        seen, created = _form()
        if _openmp() and seen != threads:
            raise PlanError(
                f"asked for {threads} threads, OpenMP gave {seen}; is OMP_THREAD_LIMIT set, or does another library "
                "replace torch.set_num_threads?"
            )
    _thread.current = wanted
    _thread.stats = PhaseStats(
        stats.switches + 1,
        stats.total_ns + time.perf_counter_ns() - begin,
        stats.threads_created + created,
    )


def _form() -> tuple[int, int]:
    _openmp()
    return _native.form_team()


@cache
def _openmp() -> str:
    return os.path.basename(_native.use_openmp())


def _read_plan() -> tuple[RankPlan, RankPlan] | None:
    """The plan in use, at first the file numarun named."""
    if not _plan_read:
        path, cpus = config().plan, config().cpus
        if not path:
            use_plan(None)
        else:
            plan = load_plan(path)
            use_plan(plan, plan.rank_of(parse_list(cpus)) if cpus or len(plan.prefill.ranks) > 1 else 0)
            if _openmp().startswith("libgomp") and plan.prefill != plan.decode:
                log.warning(
                    "phases differ in threads, and libgomp starts threads anew at each switch to more of them; "
                    "numarun --preload iomp5 keeps them"
                )
    return _plan
