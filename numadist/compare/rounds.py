"""Measure variants against each other: A B C, B C A, ... so that a change of the machine hits all alike."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import psutil

from numadist.compare import noise
from numadist.compare.statistics import Timing
from numadist.compare.variants import REFERENCE
from numadist.compare.worker import Worker
from numadist.errors import NumadistError

# Largest difference of the logits, as a share of their scale, that still counts as the same answer.
MAX_ERROR = {"float32": 1e-3, "bfloat16": 0.1}
SEED = 0


@dataclass(frozen=True)
class Protocol:
    """How often: warm-up forwards, rounds, and forwards in a round. The paper's is 10 and 50 in all."""

    warm_up: int = 10
    rounds: int = 10
    per_round: int = 5


QUICK = Protocol(warm_up=2, rounds=5, per_round=2)


@dataclass
class Row:
    """One variant on one shape. error: largest difference from the reference as a share of the logits' scale."""

    variant: str
    batch: int
    seq: int
    timing: Timing
    error: float
    first_s: float  # of the first forward: compilation is in it
    all_reduce_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass
class Case:
    """All variants on one shape, in one interleaved run; `failed` names those that gave no row, and why."""

    batch: int
    seq: int
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    foreign_cores: float = 0.0  # median over the rounds
    steal: float = 0.0


def measure_case(
    workers: dict[str, Worker],
    batch: int,
    seq: int,
    vocabulary: int,
    dtype: str,
    protocol: Protocol,
    progress: Callable[[str], None],
) -> Case:
    """Warm up, check the answers, then time in rotated order. A variant that fails is left out, not the case."""
    case = Case(batch, seq)
    input_ids = np.random.default_rng(SEED).integers(vocabulary, size=(batch, seq))
    ready = _warm_up(workers, input_ids, dtype, protocol, case, progress)
    medians: dict[str, list[float]] = {name: [] for name in ready}
    noises = []
    for round_ in range(protocol.rounds):
        progress(f"round {round_ + 1} of {protocol.rounds}")
        names = list(ready)
        first = round_ % len(names)
        before, own, begin = noise.usage(), _own_cpu_s(), time.monotonic()
        for name in names[first:] + names[:first]:
            answer = workers[name].forward(input_ids, protocol.per_round)
            medians[name].append(1e3 * statistics.median(answer.seconds))
            ready[name].all_reduce_ms, ready[name].wait_ms = 1e3 * answer.all_reduce_s, 1e3 * answer.wait_s
        wall_s = time.monotonic() - begin
        noises.append(
            noise.between(before, noise.usage(), _own_cpu_s() - own, wall_s, psutil.cpu_count() or 1)
        )
    for name, row in ready.items():
        row.timing = Timing(medians[name])
        case.rows.append(row)
    case.foreign_cores = statistics.median(n.foreign_cores for n in noises)
    case.steal = statistics.median(n.steal for n in noises)
    return case


def _warm_up(
    workers: dict[str, Worker],
    input_ids: np.ndarray,
    dtype: str,
    protocol: Protocol,
    case: Case,
    progress: Callable[[str], None],
) -> dict[str, Row]:
    """Rows without times of the variants whose answers are right (or wrong by design)."""
    rows: dict[str, Row] = {}
    reference: np.ndarray | None = None
    for name in sorted(workers, key=lambda n: n != REFERENCE):
        progress(f"warm-up of {name}")
        begin = time.monotonic()
        try:
            logits = workers[name].forward(input_ids).logits
            first_s = time.monotonic() - begin
            workers[name].forward(input_ids, protocol.warm_up - 1)
        except NumadistError as failure:
            case.failed[name] = str(failure).splitlines()[-1]
            continue
        reference = logits if reference is None else reference
        error = float(np.abs(logits - reference).max() / np.abs(reference).max())
        if workers[name].variant.reduce and not error < MAX_ERROR[dtype]:
            case.failed[name] = f"wrong answer: logits differ by {error:.1e} of their scale"
            continue
        rows[name] = Row(name, case.batch, case.seq, Timing([]), error, first_s)
    return {name: rows[name] for name in workers if name in rows}


def _own_cpu_s() -> float:
    """CPU seconds of this process and all it started."""
    return noise.process_cpu_s([psutil.Process().pid, *_descendants()])


def _descendants() -> Iterable[int]:
    return [p.pid for p in psutil.Process().children(recursive=True)]
