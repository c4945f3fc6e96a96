"""Numbers from rounds: medians, spread, ratios taken inside a round, and a verdict that noise cannot give."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 2000
_SEED = 0


@dataclass(frozen=True)
class Timing:
    """Times of one variant: one median per round, in milliseconds."""

    rounds_ms: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.rounds_ms)

    @property
    def min_ms(self) -> float:
        return min(self.rounds_ms)

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.rounds_ms)

    @property
    def cv(self) -> float:
        """Coefficient of variation of the round medians: standard deviation over mean."""
        return statistics.stdev(self.rounds_ms) / self.mean_ms if len(self.rounds_ms) > 1 else 0.0


@dataclass(frozen=True)
class Ratio:
    """Speed-up over the baseline: median of the rounds' ratios and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`faster` or `slower` only if the whole interval is on one side of 1."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "tie"


def ratio(baseline: Timing, variant: Timing) -> Ratio:
    """Rounds are paired: round i of both ran in the same minute."""
    values = [b / v for b, v in zip(baseline.rounds_ms, variant.rounds_ms, strict=True)]
    return Ratio(statistics.median(values), *bootstrap_interval(values))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, from seeded resamples; the same for the same values."""
    draw = random.Random(_SEED)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
