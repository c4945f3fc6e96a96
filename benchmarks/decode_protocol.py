"""How decode.py talks to the processes of its peers: one JSON line a question on stdin, one an answer on stdout.

Standard library only: a peer may live in an interpreter without torch.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise


def serve(make: Callable[[dict], Callable[[], Iterator[list[int]]]], precision: str) -> None:
    """A peer's main: make(setting) holds a context and returns what decodes from it, a list of tokens a step."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like
    setting = json.loads(sys.stdin.readline())
    decode = make(setting)
    tokens, _ = timed(decode(), setting["tokens"])
    print(json.dumps({"tokens": tokens, "precision": precision}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps({"step_s": timed(decode(), setting["tokens"])[1]}), file=answers, flush=True)


def timed(steps: Iterator[list[int]], count: int) -> tuple[list[list[int]], float]:
    """Tokens [B][count], the context's own next token first, and the median seconds of a step."""
    tokens, times = [next(steps)], [time.perf_counter()]
    for _ in range(count):
        tokens.append(next(steps))
        times.append(time.perf_counter())
    seconds = statistics.median(b - a for a, b in pairwise(times))
    return [list(row) for row in zip(*tokens[:-1], strict=True)], seconds
