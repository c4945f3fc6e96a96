"""From logits to the next token. Ranks exchange candidates, never logits, unless sampling needs them all.

Shapes: B rows, V this rank's part of the vocabulary, C candidates a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from numadist.errors import GenerateError
from numadist.kernels import argmax

# With more candidates than this, ranks send their logits whole.
MAX_CANDIDATES = 64


@dataclass(frozen=True)
class Sampling:
    """How a row's next token is chosen; names and order (temperature, top_k, top_p, min_p) are Hugging Face's.

    top_k: 0 samples from the whole vocabulary; it and values above 64 make every rank send all its logits each step.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0  # times the best token's probability; 0 keeps all

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise GenerateError(
                f"temperature must be positive, got {self.temperature}; greedy is do_sample=False"
            )
        if self.top_k < 0:
            raise GenerateError(f"top_k must be 0 (all) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise GenerateError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise GenerateError(f"min_p must be from 0 to 1, got {self.min_p}")

    @property
    def num_candidates(self) -> int | None:
        """Candidates that decide the choice exactly; None: the whole vocabulary."""
        if not self.do_sample:
            return 1
        return self.top_k if 0 < self.top_k <= MAX_CANDIDATES else None


def num_candidates(rows: Sequence[Sampling]) -> int | None:
    """What a batch needs."""
    counts = [row.num_candidates for row in rows]
    return None if None in counts else max(c for c in counts if c is not None)


def local_candidates(logits_BV: Tensor, count: int | None, first_token: int, num_tokens: int) -> Tensor:
    """This rank's best, best first, as one flat int32 message: [B, 2, C], bits of float32 values, then tokens.

    count: None sends all; then C is num_tokens, the largest part of the vocabulary a rank has, and the rest is -inf.
    """
    if count == 1:
        if not argmax.takes(logits_BV):
            logits_BV = logits_BV.float().contiguous()
        return argmax.argmax(logits_BV, first_token).view(-1)
    logits_BV = logits_BV.float()
    part = logits_BV.shape[-1]
    if count is None:
        values, tokens = logits_BV, torch.arange(part).expand(logits_BV.shape[0], -1)
    else:
        values, tokens = logits_BV.topk(min(count, part), dim=-1)
    missing = (num_tokens if count is None else count) - values.shape[-1]
    if missing > 0:
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, missing))
    message = torch.stack(
        [values.contiguous().view(torch.int32), (tokens + first_token).to(torch.int32)], dim=1
    )
    return message.reshape(-1)


def merge_candidates(gathered_RN: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Values and tokens of all ranks, [B, R*C], best first; of equal values the lower rank's, so the lower token.

    With one candidate a rank, only the best, [B, 1].
    """
    if gathered_RN.shape[1] == 2 * num_rows:
        return _merge_single(gathered_RN.numpy().reshape(len(gathered_RN), num_rows, 2))
    message = gathered_RN.view(len(gathered_RN), num_rows, 2, -1).permute(1, 2, 0, 3)
    values_BC = message[:, 0].reshape(num_rows, -1).contiguous().view(torch.float32)
    tokens_BC = message[:, 1].reshape(num_rows, -1).long()
    values_BC, order = values_BC.sort(dim=-1, descending=True, stable=True)
    return values_BC, tokens_BC.gather(-1, order)


def _merge_single(message_RB2: np.ndarray) -> tuple[Tensor, Tensor]:
    """By numpy: after a step the caches hold none of torch's dispatcher, and each of its operators takes 15 us."""
    values_RB = np.ascontiguousarray(message_RB2[..., 0]).view(np.float32)
    rank_B, row_B = values_RB.argmax(0), np.arange(values_RB.shape[1])
    tokens_B = message_RB2[rank_B, row_B, 1].astype(np.int64)
    return torch.from_numpy(values_RB[rank_B, row_B])[:, None], torch.from_numpy(tokens_B)[:, None]


def distribution(values_C: Tensor, tokens_C: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities and tokens that sampling draws from, out of one row's candidates, best first.

    Filling, -inf, is left out: a draw from more probabilities is another draw, though the rest are 0.
    """
    kept = values_C[: how.top_k or None]
    kept = kept[kept > -torch.inf] / how.temperature
    if how.top_p < 1:
        probabilities = kept.softmax(-1)
        better = probabilities.cumsum(-1) - probabilities  # probability of all better tokens
        kept = kept[better < how.top_p]
    if how.min_p > 0:
        probabilities = kept.softmax(-1)
        kept = kept[probabilities >= how.min_p * probabilities[0]]
    return kept.softmax(-1), tokens_C[: len(kept)]


def choose(values_C: Tensor, tokens_C: Tensor, how: Sampling, draw: torch.Generator) -> int:
    """One row's next token."""
    if not how.do_sample:
        return int(tokens_C[0])
    probabilities, tokens = distribution(values_C, tokens_C, how)
    return int(tokens[torch.multinomial(probabilities, 1, generator=draw)])
