"""Which all_reduce algorithm for how many ranks and bytes: one table."""

from numadist.config import config

# Ranks (and more, up to the next row) -> messages up to so many bytes go one-shot, larger ones two-shot.
# One-shot reads (ranks - 1) * bytes and waits once; two-shot reads 2 * bytes and waits twice.
# From benchmarks/all_reduce.py on two cores, where ranks share cores; a real server wants its own run.
ONE_SHOT_BYTES = {3: 32 << 10, 5: 16 << 10, 9: 8 << 10}


def one_shot_bytes(world: int) -> int:
    """The largest message of the one-shot algorithm; NUMADIST_ONE_SHOT_BYTES overrides the table."""
    if config().one_shot_bytes >= 0:
        return config().one_shot_bytes
    return next((limit for ranks, limit in sorted(ONE_SHOT_BYTES.items(), reverse=True) if ranks <= world), 0)


def algorithm(world: int, num_bytes: int) -> str:
    """Name of the all_reduce that the core runs: copy, swap, one-shot or two-shot (docs/algorithms.md)."""
    if world <= 2:
        return "swap" if world == 2 else "copy"
    return "one-shot" if num_bytes <= one_shot_bytes(world) else "two-shot"
