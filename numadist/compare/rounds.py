"""Measure variants against each other: A B C, B C A, ... so that a change of the machine hits all alike."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import psutil

from numadist.compare import noise
from numadist.compare.profiles import MIN_ROUNDS, Profile
from numadist.compare.statistics import Timing
from numadist.compare.variants import REFERENCE, CannotRun
from numadist.compare.worker import Worker
from numadist.errors import NumadistError

# Largest difference of the answers, as a share of their scale, that still counts as the same answer.
MAX_ERROR = {"float32": 1e-3, "bfloat16": 0.1}
MAX_REPEATS = 3  # of a round that others disturbed
DISTURBED_CORES = 0.2  # cores kept busy by others in a round, from which it is taken again


@dataclass
class Row:
    """One variant in a case. error: largest difference from the reference as a share of its scale."""

    variant: str
    timing: Timing
    error: float
    first_s: float  # of the first forward: compilation is in it
    all_reduce_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass
class Case:
    """All variants on one shape, in one interleaved run; `failed` names those that gave no row, and why.

    left_out: those that do not take this model or dtype.
    """

    model: str
    batch: int
    seq: int
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    skipped: str = ""  # why nothing was timed
    foreign_cores: float = 0.0  # median over the rounds
    steal: float = 0.0
    repeated: int = 0  # rounds taken again


def measure_case(
    workers: dict[str, Worker],
    case: Case,
    dtype: str,
    profile: Profile,
    progress: Callable[[str], None],
) -> None:
    """Fill the case: warm up, check the answers, then time in rotated order.

    A variant that fails is left out, not the case. The reference is timed only if it was asked for.
    """
    ready = _warm_up(workers, case, dtype, profile, progress)
    if not ready or case.skipped:
        return
    rounds: list[dict[str, float]] = []
    noises = []
    begin = time.monotonic()
    while len(rounds) < profile.rounds:
        if len(rounds) >= MIN_ROUNDS and time.monotonic() - begin > profile.case_s:
            break
        progress(f"round {len(rounds) + 1} of {profile.rounds}")
        medians, disturbance = _round(workers, ready, case, profile, len(rounds))
        if disturbance.foreign_cores > DISTURBED_CORES and case.repeated < MAX_REPEATS:
            case.repeated += 1
            continue
        rounds.append(medians)
        noises.append(disturbance)
    for name, row in ready.items():
        row.timing = Timing([medians[name] for medians in rounds])
        case.rows.append(row)
    case.foreign_cores = statistics.median(n.foreign_cores for n in noises)
    case.steal = statistics.median(n.steal for n in noises)


def _round(
    workers: dict[str, Worker], ready: dict[str, Row], case: Case, profile: Profile, number: int
) -> tuple[dict[str, float], noise.Noise]:
    """Median milliseconds of each variant, the first one another in every round."""
    names = list(ready)
    first = number % len(names)
    before, own, begin = noise.usage(), _own_cpu_s(), time.monotonic()
    medians = {}
    for name in names[first:] + names[:first]:
        answer = workers[name].forward(case.batch, case.seq, profile.per_round)
        medians[name] = 1e3 * statistics.median(answer.seconds)
        ready[name].all_reduce_ms, ready[name].wait_ms = 1e3 * answer.all_reduce_s, 1e3 * answer.wait_s
    wall_s = time.monotonic() - begin
    num_cpus = psutil.cpu_count() or 1
    return medians, noise.between(before, noise.usage(), _own_cpu_s() - own, wall_s, num_cpus)


def _warm_up(
    workers: dict[str, Worker], case: Case, dtype: str, profile: Profile, progress: Callable[[str], None]
) -> dict[str, Row]:
    """Rows without times of the variants whose answers are right (or wrong by design)."""
    rows: dict[str, Row] = {}
    reference: np.ndarray | None = None
    forward_s = 0.0  # of all variants, once
    for name in sorted(workers, key=lambda n: n != REFERENCE):
        progress(f"warm-up of {name}")
        begin = time.monotonic()
        try:
            last = workers[name].forward(case.batch, case.seq).last
            first_s = time.monotonic() - begin
            if workers[name].is_timed:
                forward_s += min(workers[name].forward(case.batch, case.seq, profile.warm_up - 1).seconds)
        except CannotRun as limit:
            case.left_out[name] = str(limit)
            continue
        except NumadistError as failure:
            case.failed[name] = str(failure).splitlines()[-1]
            continue
        reference = last if reference is None else reference
        error = float(np.abs(last - reference).max() / np.abs(reference).max())
        if workers[name].variant.reduce and not error < MAX_ERROR[dtype]:
            case.failed[name] = f"wrong answer: differs by {error:.1e} of its scale"
            continue
        rows[name] = Row(name, Timing([]), error, first_s)
    if (needed_s := MIN_ROUNDS * profile.per_round * forward_s) > profile.skip_s:
        case.skipped = f"{MIN_ROUNDS} rounds would take {needed_s:.0f} s, more than {profile.skip_s:.0f} s"
    return {name: rows[name] for name, worker in workers.items() if name in rows and worker.is_timed}


def _own_cpu_s() -> float:
    """CPU seconds of this process and all it started."""
    return noise.process_cpu_s([psutil.Process().pid, *_descendants()])


def _descendants() -> Iterable[int]:
    return [p.pid for p in psutil.Process().children(recursive=True)]
