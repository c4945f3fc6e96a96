"""Continuous batching on rank 0: which rows exist, which step comes next, who is done.

Rows 0 to n-1 hold the requests that decode; row n may hold one whose prompt is being read in chunks. Rows in use stay
together, so that every step is a view of the KV tensors: a row that becomes free is filled with the last one.
"""

import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from numadist.errors import GenerateError
from numadist.generation.logits import Rules
from numadist.generation.runner import Runner, check_prompt
from numadist.generation.sampling import Sampling, choose, num_candidates
from numadist.phases.phase import Phase, phase

# A step that reads several prompts at once computes at most so many tokens, padding included.
PREFILL_TOKENS = 2048


class Policy(enum.Enum):
    """What goes first when prompts wait and rows decode."""

    PREFILL_FIRST = (
        "prefill-first"  # a waiting prompt is read whole as soon as a row is free; decoding stands still
    )
    DECODE_FIRST = "decode-first"  # rows decode to their end; the next prompts are read when all are done
    CHUNKED = "chunked"  # every step decodes all rows, then reads one chunk of one prompt


@dataclass(eq=False)
class Request:
    """One prompt and what has become of it. Times are of time.perf_counter."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    rules: Rules | None = None  # what changes the logits before a token is chosen
    stops: Callable[[list[int]], bool] | None = None  # whether prompt and tokens end with a stop string
    on_token: Callable[[int], None] | None = None  # called on rank 0 with every new token
    deadline: float | None = None
    tokens: list[int] = field(default_factory=list)  # generated, a stop id included
    finish_reason: str = ""  # stop | length | cancelled | timeout; empty while it runs
    arrival: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_read: int = 0  # tokens of the prompt in the KV tensors

    @property
    def done(self) -> bool:
        """It has a finish_reason: no token will be added."""
        return bool(self.finish_reason)


class Engine:
    """Runs requests over a Runner, on rank 0 only. Not thread-safe."""

    def __init__(
        self,
        runner: Runner,
        policy: Policy = Policy.PREFILL_FIRST,
        *,
        chunk_tokens: int = 128,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if chunk_tokens < 1:
            raise GenerateError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        self.runner, self.policy, self.chunk_tokens, self.clock = runner, policy, chunk_tokens, clock
        self.draw = torch.Generator().manual_seed(seed)
        self.waiting: deque[Request] = deque()
        self.decoding: list[Request] = []  # in the order of their rows
        self.reading: Request | None = None  # in the row behind them

    @property
    def rows_in_use(self) -> int:
        """Rows of the KV cache that requests occupy now."""
        return len(self.decoding) + (self.reading is not None)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.rows_in_use

    def submit(self, request: Request) -> None:
        """Queue a request. Raises: GenerateError if it can never run."""
        check_prompt(
            request.prompt, request.max_new_tokens, self.runner.max_tokens, self.runner.vocabulary_size
        )
        request.arrival = request.arrival or self.clock()
        self.waiting.append(request)

    def cancel(self, request: Request, reason: str = "cancelled") -> None:
        """End a request now; its row is free when this returns. Nothing happens to one that is done."""
        if request.done:
            return
        request.finish_reason = reason
        if request in self.waiting:
            self.waiting.remove(request)
        elif request is self.reading:
            self.reading = None
        else:
            self._free(self.decoding.index(request))

    def cancel_all(self, reason: str = "cancelled") -> None:
        """Cancel every request, waiting or running; `reason` becomes their finish_reason."""
        for request in [*self.waiting, *self.decoding, *([self.reading] if self.reading else [])]:
            self.cancel(request, reason)

    def run(self) -> None:
        """Step until nothing is left; if a callback raises, or the user interrupts, no row stays in use."""
        try:
            with phase(Phase.PREFILL):  # afterwards this thread has its own number of threads again
                while self.step():
                    pass
        finally:
            self.cancel_all()

    def step(self) -> bool:
        """One step of the policy; False if there was nothing to do."""
        self._expire()
        if self.policy is Policy.CHUNKED:
            decoded = self._decode()
            return self._read_chunk() or decoded
        may_read = self.policy is Policy.PREFILL_FIRST or not self.decoding
        return (may_read and self._read_prompts()) or self._decode()

    def _expire(self) -> None:
        now = self.clock()
        for request in [*self.waiting, *self.decoding, *([self.reading] if self.reading else [])]:
            if request.deadline is not None and now >= request.deadline:
                self.cancel(request, "timeout")

    def _read_prompts(self) -> bool:
        """Read as many waiting prompts whole as there are rows for, in one step."""
        taken: list[Request] = []
        longest = 0
        while self.waiting and len(self.decoding) + len(taken) < self.runner.max_rows:
            longest = max(longest, len(self.waiting[0].prompt))
            if taken and longest * (len(taken) + 1) > PREFILL_TOKENS:
                break
            taken.append(self.waiting.popleft())
        if not taken:
            return False
        first_row = len(self.decoding)
        self.decoding += taken
        self._run(first_row, taken, [r.prompt for r in taken], [0] * len(taken))
        return True

    def _read_chunk(self) -> bool:
        """Read the next chunk of the prompt whose turn it is; with its last chunk it starts to decode."""
        if self.reading is None and self.waiting and len(self.decoding) < self.runner.max_rows:
            self.reading = self.waiting.popleft()
        request = self.reading
        if request is None:
            return False
        row, start = len(self.decoding), request.num_read
        chunk = request.prompt[start : start + self.chunk_tokens]
        if start + len(chunk) == len(request.prompt):
            self.reading = None
            self.decoding.append(request)
            self._run(row, [request], [chunk], [start])
        else:
            self.runner.run(row, [chunk], [start], 1)
            request.num_read = start + len(chunk)
        return True

    def _decode(self) -> bool:
        """One more token for every row that decodes."""
        if not self.decoding:
            return False
        rows = list(self.decoding)
        starts = [len(r.prompt) + len(r.tokens) - 1 for r in rows]
        self._run(0, rows, [r.tokens[-1:] for r in rows], starts)
        return True

    def _run(
        self, first_row: int, requests: list[Request], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> None:
        count = num_candidates([r.sampling for r in requests])
        edits = [r.rules.edit(r.prompt, r.tokens) if r.rules is not None else None for r in requests]
        values, candidates = self.runner.run(first_row, tokens, starts, count, edits)
        now = self.clock()
        for i, request in enumerate(requests):
            if request.done:  # another one's callback cancelled it
                continue
            token = choose(values[i], candidates[i], request.sampling, self.draw)
            request.tokens.append(token)
            request.token_times.append(now)
            if request.on_token is not None:
                request.on_token(token)
            if request.done:
                continue
            if token in request.stop_ids or (
                request.stops is not None and request.stops([*request.prompt, *request.tokens])
            ):
                request.finish_reason = "stop"
            elif len(request.tokens) == request.max_new_tokens:
                request.finish_reason = "length"
        for row in reversed(range(first_row, first_row + len(requests))):
            if row < len(self.decoding) and self.decoding[row].done:
                self._free(row)

    def _free(self, row: int) -> None:
        """Fill the row with the last one that decodes, and that one's with the one being read."""
        last = len(self.decoding) - 1
        if row != last:
            moved = self.decoding[row] = self.decoding[last]
            self.runner.move_row(last, row, len(moved.prompt) + len(moved.tokens))
        self.decoding.pop()
        if self.reading is not None:
            self.runner.move_row(last + 1, last, self.reading.num_read)
