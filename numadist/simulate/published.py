"""Every figure of arXiv 2611.07105 that a model can predict, beside what ours predicts.

A figure marked `fitted` was used to choose the constants of software.NUMA_TORCH (or in view when a preset's constant
was chosen) and validates nothing.
"""

import functools
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from numadist.costmodel.op_work import Work
from numadist.costmodel.presets import CASCADE_LAKE, HASWELL_EP, HASWELL_EX
from numadist.costmodel.price import process_s, sharded_s
from numadist.costmodel.profile import MachineProfile
from numadist.costmodel.software import NUMA_TORCH, Software
from numadist.simulate.models import ModelWork

MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "bert-small", "bert-large", "gemma3-270m")
BATCHES = (1, 2, 4, 8)
SEQUENCES = (128, 256, 512, 1024, 2048, 4096)
MEASURED_ON_HASWELL_EX = 120  # of 144: the others did not fit in 64 GB

Config = tuple[str, int, int]  # model, batch, sequence
CONFIGS: list[Config] = [(m, b, s) for m in MODELS for b in BATCHES for s in SEQUENCES]
SHARDED = "sharded"


@functools.cache
def works(num_ranks: int) -> dict[Config, Work]:
    """Work of all configurations; takes some seconds the first time."""
    return {(m, b, s): _model(m).work(num_ranks, b, s, NUMA_TORCH) for m, b, s in CONFIGS}


@functools.cache
def _model(name: str) -> ModelWork:
    return ModelWork(name, max(SEQUENCES))


class Predictions:
    """What one set of constants predicts, computed where it is asked for."""

    def __init__(self, software: Software = NUMA_TORCH):
        self.software = software
        self._times: dict[tuple[str, str], dict[Config, float]] = {}

    def seconds(self, machine: MachineProfile, variant: str) -> dict[Config, float]:
        """variant: a policy of one process, or SHARDED."""
        key = machine.name, variant
        if key not in self._times:
            self._times[key] = {c: self._one(machine, variant, c) for c in self._configs(machine)}
        return self._times[key]

    def speed_ups(self, machine: MachineProfile, variant: str = SHARDED) -> dict[Config, float]:
        """Over one process with the default policy."""
        base, other = self.seconds(machine, "default"), self.seconds(machine, variant)
        return {config: base[config] / other[config] for config in base}

    def _one(self, machine: MachineProfile, variant: str, config: Config) -> float:
        work = works(machine.nodes)[config]
        if variant == SHARDED:
            return sharded_s(work, machine, self.software)
        return process_s(work, machine, self.software, variant)

    def _configs(self, machine: MachineProfile) -> list[Config]:
        if machine is not HASWELL_EX:
            return CONFIGS
        # Which ones did not fit is not published: those with the largest score matrix are left out.
        by_scores = sorted(
            CONFIGS, key=lambda c: max(op.scores / op.count for op in works(4)[c].ops if op.count)
        )
        return sorted(by_scores[:MEASURED_ON_HASWELL_EX])


@dataclass(frozen=True)
class Figure:
    """kind: speed-up | slower (how many of `of` configurations are slower than the default) | seconds.

    mean: it is a geometric mean. in_view: chose no constant, but an equation was changed after it had been compared.
    """

    name: str
    published: float
    predict: Callable[[Predictions], float]
    kind: str = "speed-up"
    of: int = 0
    fitted: bool = False
    mean: bool = False
    in_view: bool = False

    @property
    def held_out(self) -> bool:
        return not (self.fitted or self.in_view)


@dataclass(frozen=True)
class Result:
    figure: Figure
    predicted: float

    @property
    def error(self) -> float | None:
        """Relative; of a count, as a share of all configurations."""
        figure = self.figure
        if figure.kind == "slower":
            return (self.predicted - figure.published) / figure.of
        return self.predicted / figure.published - 1

    @property
    def sign_is_right(self) -> bool | None:
        """Faster or slower as published. A published `none` or `all` must hold for every single configuration; any
        other count must be on the same side of one half. None: the figure has no sign."""
        figure = self.figure
        if figure.kind == "seconds":
            return None
        if figure.kind == "speed-up":
            return (self.predicted > 1) == (figure.published > 1)
        if figure.published in (0, figure.of):
            return self.predicted == figure.published
        return (2 * self.predicted > figure.of) == (2 * figure.published > figure.of)


def validate(software: Software = NUMA_TORCH) -> list[Result]:
    predictions = Predictions(software)
    return [Result(figure, figure.predict(predictions)) for figure in FIGURES]


def share_of_right_signs(results: list[Result]) -> float:
    """Over the held-out figures that have a sign."""
    held_out = [r.sign_is_right for r in results if r.figure.held_out and r.sign_is_right is not None]
    return sum(held_out) / len(held_out)


def worst_mean_error(results: list[Result]) -> float:
    """Largest absolute error of the held-out geometric means."""
    return max(abs(r.error or 0) for r in results if r.figure.mean and r.figure.held_out)


def _at(machine: MachineProfile, *config: str | int) -> Callable[[Predictions], float]:
    return lambda p: p.speed_ups(machine)[config]  # type: ignore[index]


def _over(
    fold: Callable[[list[float]], float],
    machine: MachineProfile,
    variant: str = SHARDED,
    keep: Callable[[str, int, int], bool] = lambda model, batch, seq: True,
) -> Callable[[Predictions], float]:
    """fold: over the speed-ups of the configurations kept."""
    return lambda p: fold([v for c, v in p.speed_ups(machine, variant).items() if keep(*c)])


def _slower(values: list[float]) -> float:
    return sum(v < 1 for v in values)


def _gemma(model: str, batch: int, seq: int) -> bool:
    return model == "gemma3-270m"


def _sequence(test: Callable[[int], bool]) -> Callable[[str, int, int], bool]:
    return lambda model, batch, seq: test(seq)


def _policy(variant: str, shown: str, mean: float, median: float, slower: int, fitted: bool) -> list[Figure]:
    """A line of the paper's policy table, on Cascade Lake. Interleave was first modelled with a gain of its own."""
    gm, machine = statistics.geometric_mean, CASCADE_LAKE
    figures = [
        Figure(f"{shown}, geometric mean", mean, _over(gm, machine, variant), fitted=fitted, mean=True),
        Figure(f"{shown}, median", median, _over(statistics.median, machine, variant)),
        Figure(f"{shown}, slower", slower, _over(_slower, machine, variant), "slower", 144),
    ]
    return [replace(figure, in_view=variant == "interleave") for figure in figures]


_GM = statistics.geometric_mean
FIGURES: list[Figure] = [
    Figure("Haswell: GPT-2 345M, batch 8, S=256", 2.63, _at(HASWELL_EP, "gpt2-medium", 8, 256), fitted=True),
    Figure("Haswell: BERT small, batch 8, S=256", 2.10, _at(HASWELL_EP, "bert-small", 8, 256)),
    Figure(
        "Haswell: often above 2.0 from S=1024 (median)",
        2.0,
        _over(statistics.median, HASWELL_EP, keep=_sequence(lambda s: s >= 1024)),
    ),
    Figure("Haswell: Gemma 3, largest", 1.96, _over(max, HASWELL_EP, keep=_gemma)),
    Figure("Cascade Lake: smallest", 1.10, _over(min, CASCADE_LAKE)),
    Figure("Cascade Lake: largest", 1.87, _over(max, CASCADE_LAKE)),
    Figure("Cascade Lake: geometric mean", 1.38, _over(_GM, CASCADE_LAKE), fitted=True, mean=True),
    Figure("Cascade Lake: median", 1.44, _over(statistics.median, CASCADE_LAKE)),
    Figure("Cascade Lake: slower", 0, _over(_slower, CASCADE_LAKE), "slower", 144),
    Figure("Cascade Lake: Gemma 3, largest", 1.76, _over(max, CASCADE_LAKE, keep=_gemma)),
    *_policy("interleave", "Cascade Lake: numactl --interleave=all", 1.08, 1.02, 44, False),
    *_policy("localalloc", "Cascade Lake: numactl --localalloc", 1.12, 1.06, 19, True),
    *_policy("one-node", "Cascade Lake: one socket", 0.59, 0.59, 143, True),
    *(
        Figure(
            f"Haswell-EX: S={seq}, geometric mean",
            mean,
            _over(_GM, HASWELL_EX, keep=_sequence(functools.partial(operator.eq, seq))),
            fitted=True,
            mean=True,
        )
        for seq, mean in ((128, 0.48), (4096, 1.56))
    ),
    Figure(
        "Haswell-EX: still slower at S=1024 (below 1.0)",
        0.99,
        _over(_GM, HASWELL_EX, keep=_sequence(lambda s: s == 1024)),
    ),
    Figure(
        "Haswell-EX: faster at S=2048 (above 1.0)",
        1.01,
        _over(_GM, HASWELL_EX, keep=_sequence(lambda s: s == 2048)),
    ),
    Figure(
        "Haswell-EX: S>=2048, geometric mean",
        1.38,
        _over(_GM, HASWELL_EX, keep=_sequence(lambda s: s >= 2048)),
        mean=True,
    ),
    Figure(
        "Haswell-EX: slower at S>=2048",
        0,
        _over(_slower, HASWELL_EX, keep=_sequence(lambda s: s >= 2048)),
        "slower",
        24,
    ),
    Figure(
        "Haswell-EX: slower at S<=512",
        72,
        _over(_slower, HASWELL_EX, keep=_sequence(lambda s: s <= 512)),
        "slower",
        72,
    ),
    Figure("Haswell-EX: BERT small, batch 2, S=4096", 2.27, _at(HASWELL_EX, "bert-small", 2, 4096)),
    Figure(
        "Haswell-EX: the same, one process, seconds",
        25.8,
        lambda p: p.seconds(HASWELL_EX, "default")["bert-small", 2, 4096],
        "seconds",
        fitted=True,
    ),
    Figure(
        "Haswell-EX: the same, sharded, seconds",
        11.3,
        lambda p: p.seconds(HASWELL_EX, SHARDED)["bert-small", 2, 4096],
        "seconds",
    ),
]


def settings(software: Software = NUMA_TORCH) -> Mapping[str, tuple[float, str]]:
    """Fitted constant -> (value, the figure that pins it)."""
    return {
        "bytes_per_flop": (software.bytes_per_flop, "Haswell 2.63, Haswell-EX S=128"),
        "score_bytes": (software.score_bytes, "Haswell-EX 25.8 s and S=4096"),
        "l2_exponent": (software.l2_exponent, "Cascade Lake geometric mean 1.38"),
        "balancing": (software.balancing, "localalloc geometric mean 1.12"),
        "one_node_slowdown": (software.one_node_slowdown, "one socket geometric mean 0.59"),
        "sum_passes[4]": (software.sum_passes[4], "Haswell-EX S=128"),
    }
