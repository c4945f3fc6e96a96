"""Requests that arrive by chance, served by the engine: latencies, goodput, attainment.

Names are those of `vllm bench serve`: ttft (time to first token), tpot (time per output token after the first), itl
(gaps between tokens), e2el (end to end), goodput (requests a second that met both targets).
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numadist.generation.engine import Engine, Request

# Followers wait for rank 0's next command; it speaks at least so often.
IDLE_S = 1.0


@dataclass(frozen=True)
class Workload:
    """Synthetic requests: Poisson arrivals, log-normal lengths like those of chat logs, random tokens; all seeded."""

    num_requests: int
    rate: float  # requests a second
    prompt_median: int
    output_median: int
    sigma: float  # of the logarithm of both lengths
    vocabulary: int
    max_tokens: int  # of prompt and output together
    seed: int = 0

    def requests(self) -> list[tuple[float, Request]]:
        """(seconds after the start, request), in order of arrival."""
        draw = random.Random(self.seed)
        arrivals = itertools.accumulate(draw.expovariate(self.rate) for _ in range(self.num_requests))
        return [(arrival, self._request(draw)) for arrival in arrivals]

    def _request(self, draw: random.Random) -> Request:
        prompt = self._length(draw, self.prompt_median, self.max_tokens * 3 // 4)
        output = max(2, self._length(draw, self.output_median, self.max_tokens - prompt))
        return Request([draw.randrange(self.vocabulary) for _ in range(prompt)], output)

    def _length(self, draw: random.Random, median: int, limit: int) -> int:
        return max(1, min(limit, round(draw.lognormvariate(math.log(median), self.sigma))))


@dataclass(frozen=True)
class Targets:
    """What a request must meet to count: both at once."""

    ttft_ms: float
    tpot_ms: float

    def met(self, request: Request) -> bool:
        return ttft_ms(request) <= self.ttft_ms and tpot_ms(request) <= self.tpot_ms


def ttft_ms(request: Request) -> float:
    return 1e3 * (request.token_times[0] - request.arrival)


def tpot_ms(request: Request) -> float:
    return 1e3 * (request.token_times[-1] - request.token_times[0]) / (len(request.token_times) - 1)


def itl_ms(request: Request) -> list[float]:
    return [1e3 * (b - a) for a, b in itertools.pairwise(request.token_times)]


def e2el_ms(request: Request) -> float:
    return 1e3 * (request.token_times[-1] - request.arrival)


def serve(engine: Engine, workload: Workload) -> tuple[list[Request], float]:
    """Rank 0: run the workload in real time to its last token; the requests and the seconds it took."""
    todo = workload.requests()
    begin = engine.clock()
    for arrival, request in todo:
        request.arrival = begin + arrival
    waiting = [request for _, request in todo]
    while waiting or not engine.idle:
        now = engine.clock()
        while waiting and waiting[0].arrival <= now:
            engine.submit(waiting.pop(0))
        if not engine.step() and waiting:
            engine.runner.idle()
            time.sleep(min(IDLE_S, max(0.0, waiting[0].arrival - engine.clock())))
    return [request for _, request in todo], engine.clock() - begin


def summary(requests: Sequence[Request], seconds: float, targets: Targets) -> dict[str, Any]:
    """One row of the result, keys as vLLM's."""
    good = sum(targets.met(r) for r in requests)
    output_tokens = sum(len(r.tokens) for r in requests)
    row: dict[str, Any] = {
        "completed": len(requests),
        "duration_s": seconds,
        "total_input_tokens": sum(len(r.prompt) for r in requests),
        "total_output_tokens": output_tokens,
        "request_throughput": len(requests) / seconds,
        "output_throughput": output_tokens / seconds,
        "request_goodput": good / seconds,
        "attainment": good / len(requests),
    }
    series = {
        "ttft": [ttft_ms(r) for r in requests],
        "tpot": [tpot_ms(r) for r in requests],
        "itl": [gap for r in requests for gap in itl_ms(r)],
        "e2el": [e2el_ms(r) for r in requests],
    }
    for name, values in series.items():
        row[f"mean_{name}_ms"] = statistics.fmean(values)
        row |= {f"p{p}_{name}_ms": percentile(values, p) for p in (50, 90, 99)}
    return row


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Unloaded:
    """What the machine does for one request alone, and for a full batch: the scale of rates and targets."""

    prefill_s: float  # of a prompt of the median length
    step_s: float  # of a decode step with one row
    full_step_s: float  # of a decode step with all rows

    def capacity(self, workload: Workload, max_rows: int) -> float:
        """Requests a second at which the engine is busy all the time, roughly."""
        mean = math.exp(workload.sigma**2 / 2)  # mean over median of a log-normal
        per_request = mean * (self.prefill_s + workload.output_median * self.full_step_s / max_rows)
        return 1 / per_request


def calibrate(engine: Engine, workload: Workload, steps: int = 8) -> Unloaded:
    """Rank 0: time one prompt and decode steps on an idle engine; the fastest of each, as noise only adds."""
    draw = random.Random(workload.seed)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(workload.vocabulary) for _ in range(length)]

    def timed(rows: int) -> tuple[float, float]:
        for _ in range(rows):
            engine.submit(Request(prompt(workload.prompt_median), steps + 2))
        begin = engine.clock()
        while engine.waiting:
            engine.step()
        prefill = engine.clock() - begin
        seconds = []
        for _ in range(steps):
            begin = engine.clock()
            engine.step()
            seconds.append(engine.clock() - begin)
        engine.cancel_all()
        return prefill, min(seconds)

    timed(1)
    singles = [timed(1) for _ in range(3)]
    _, full = timed(engine.runner.max_rows)
    return Unloaded(min(p for p, _ in singles), min(s for _, s in singles), full)
