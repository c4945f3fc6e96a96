"""How long to measure, and what when nothing is named: `--quick`, `--small`, `--paper`."""

from dataclasses import dataclass

Shape = tuple[int, int]  # batch, sequence


@dataclass(frozen=True)
class Profile:
    """Protocol of a run and its default models and shapes.

    warm_up: forwards thrown away. rounds x per_round forwards are timed, rounds stopping early, but never below
    MIN_ROUNDS, once a shape has taken case_s seconds. A shape whose MIN_ROUNDS would take more than skip_s is
    skipped, and said to be.
    """

    warm_up: int
    rounds: int
    per_round: int
    case_s: float
    skip_s: float
    models: tuple[str, ...]
    shapes: tuple[Shape, ...]


MIN_ROUNDS = 5

# The models, shapes and counts of arXiv 2611.07105.
PAPER = Profile(
    warm_up=10,
    rounds=10,
    per_round=5,
    case_s=float("inf"),
    skip_s=3600,
    models=("gpt2", "gpt2-medium", "gpt2-large", "bert-small", "bert-large", "gemma3-270m"),
    shapes=tuple((batch, seq) for batch in (1, 2, 4, 8) for seq in (128, 256, 512, 1024, 2048, 4096)),
)
# The paper's counts on one model: what `numadist compare` does unasked.
DEFAULT = Profile(10, 10, 5, float("inf"), 3600, ("gpt2",), ((1, 128), (1, 512)))
SMALL = Profile(
    warm_up=3,
    rounds=8,
    per_round=2,
    case_s=60,
    skip_s=240,
    models=("gpt2", "gpt2-medium", "bert-large", "gemma3-270m"),
    shapes=((1, 128), (1, 512), (8, 128), (1, 2048)),
)
QUICK = Profile(
    warm_up=2,
    rounds=5,
    per_round=2,
    case_s=60,
    skip_s=120,
    models=("gpt2-4-layers", "bert-small"),
    shapes=((1, 128), (8, 128)),
)
