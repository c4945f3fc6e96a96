"""What changes logits before a token is chosen: penalties and bans, which every rank applies to its own part.

Rank 0 knows the tokens of all rows and says what to change; without a change nothing is sent. Order and arithmetic are
those of Hugging Face's processors, in float32.

Shapes: B rows, V this rank's part of the vocabulary.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numadist.errors import GenerateError


@dataclass(frozen=True)
class Edit:
    """What to change in one row's logits: `seen` tokens are penalized, `banned` ones get -inf."""

    penalty: float = 1.0
    seen: Sequence[int] = ()
    banned: Sequence[int] = ()


@dataclass(frozen=True)
class Rules:
    """What changes one request's logits, by Hugging Face's names; min_new_tokens bans eos until then.

    given: tokens of the prompt that count as said before, those that its mask leaves out behind the first one too, as
    Hugging Face (5.24) counts them.
    """

    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.repetition_penalty > 0:
            raise GenerateError(f"repetition_penalty must be positive, got {self.repetition_penalty}")

    def edit(self, prompt: Sequence[int], tokens: Sequence[int]) -> Edit | None:
        """For the token that follows; None: nothing changes."""
        banned = self.suppress_tokens
        if not tokens:
            banned += self.begin_suppress_tokens
        if len(tokens) < self.min_new_tokens:
            banned += self.eos_token_ids
        if self.repetition_penalty != 1.0:
            return Edit(self.repetition_penalty, sorted({*self.given, *prompt, *tokens}), banned)
        return Edit(banned=banned) if banned else None


def pack(edits: Sequence[Edit | None]) -> Tensor:
    """One message for all rows, int64."""
    words: list[int] = []
    for edit in edits:
        edit = edit or Edit()
        (bits,) = struct.unpack("q", struct.pack("d", edit.penalty))
        words += [bits, len(edit.seen), len(edit.banned), *edit.seen, *edit.banned]
    return torch.tensor(words)


def unpack(message: Tensor) -> list[Edit]:
    words, edits, at = message.tolist(), [], 0
    while at < len(words):
        bits, num_seen, num_banned = words[at : at + 3]
        (penalty,) = struct.unpack("d", struct.pack("q", bits))
        middle, end = at + 3 + num_seen, at + 3 + num_seen + num_banned
        edits.append(Edit(penalty, words[at + 3 : middle], words[middle:end]))
        at = end
    return edits


def edited(logits_BV: Tensor, message: Tensor, first_token: int) -> Tensor:
    """The logits of tokens from first_token on with what a message says changed, float32."""
    logits_BV = logits_BV.to(torch.float32, copy=True)
    for row_V, edit in zip(logits_BV, unpack(message), strict=True):
        if edit.seen:
            seen = _local(edit.seen, first_token, len(row_V))
            score = row_V[seen]
            row_V[seen] = torch.where(score < 0, score * edit.penalty, score / edit.penalty)
        if edit.banned:
            row_V[_local(edit.banned, first_token, len(row_V))] = -torch.inf
    return logits_BV


def _local(tokens: Sequence[int], first: int, size: int) -> Tensor:
    """Those of the tokens that this rank has, counted from its first one."""
    places = torch.tensor(tokens) - first
    return places[(places >= 0) & (places < size)]
