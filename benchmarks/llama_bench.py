"""What llama.cpp's program llama-batched-bench prints."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Case(NamedTuple):
    """A line of its table: tokens of a prompt, rows, and tokens/s of all rows, of prompts and of decoding."""

    context: int
    rows: int
    prompt: float
    decode: float


def cases(output: str) -> Iterator[Case]:
    for line in output.splitlines():
        numbers = re.findall(r"[0-9.]+", line)
        if line.startswith("|") and len(numbers) == 10:  # PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S
            yield Case(int(numbers[0]), int(numbers[2]), float(numbers[5]), float(numbers[7]))
