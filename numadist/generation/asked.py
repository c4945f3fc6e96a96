"""What a call of generate asks for: prompts without their padding, and its options. Read on rank 0 only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numadist.errors import GenerateError
from numadist.generation.engine import Request
from numadist.generation.options import Options, decide


@dataclass(frozen=True)
class Asked:
    """prompts: without padding. given: without that before the first token, as Hugging Face penalizes repetitions.

    widths: tokens with all padding, as Hugging Face counts them.
    """

    prompts: list[list[int]]
    given: list[list[int]]
    widths: list[int]
    options: Options

    @property
    def longest(self) -> int:
        """Tokens of the longest row there may be, padding left out."""
        new = map(self.options.max_new_tokens, self.widths)
        return max(len(prompt) + n for prompt, n in zip(self.prompts, new, strict=True))

    def requests(self, on_token: Callable[[int, int], None] | None, deadline: float | None) -> list[Request]:
        return [self._request(row, on_token, deadline) for row in range(len(self.prompts))]

    def _request(
        self, row: int, on_token: Callable[[int, int], None] | None, deadline: float | None
    ) -> Request:
        options, width = self.options, self.widths[row]
        stops = options.stops

        def stopped(tokens: list[int]) -> bool:
            return stops is not None and bool(stops(torch.tensor([tokens]), None))

        def tell(token: int) -> None:
            if on_token is not None:
                on_token(row, token)

        return Request(
            self.prompts[row],
            options.max_new_tokens(width),
            options.sampling,
            frozenset(options.eos_token_ids),
            rules=options.rules(self.given[row], width),
            stops=None if stops is None else stopped,
            on_token=None if on_token is None else tell,
            deadline=deadline,
        )


def read(
    config: Any,
    defaults: Any,
    input_ids: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | None,
    generation_config: Any,
    tokenizer: Any,
    fields: Mapping[str, Any],
) -> Asked:
    """config, defaults: the model's config and generation_config. Raises: GenerateError."""
    limit = getattr(config, "max_position_embeddings", None)
    options = decide(fields, generation_config, defaults, tokenizer, limit)
    if isinstance(input_ids, Tensor):
        mask_BT = _mask(input_ids, attention_mask, options)
        prompts = [row[kept].tolist() for row, kept in zip(input_ids, mask_BT, strict=True)]
        given = [row[_first(kept) :].tolist() for row, kept in zip(input_ids, mask_BT, strict=True)]
        widths = [input_ids.shape[1]] * len(prompts)
    elif attention_mask is None:
        prompts = given = [list(map(int, prompt)) for prompt in input_ids]
        widths = [len(prompt) for prompt in prompts]
    else:
        raise GenerateError("attention_mask goes with a tensor of input_ids; lists have their own lengths")
    if not prompts:
        raise GenerateError("no prompts")
    return Asked(prompts, given, widths, options)


def _first(kept_T: Tensor) -> int:
    """The place of the first token that is no padding; 0 if all are."""
    return int(kept_T.int().argmax()) if kept_T.numel() else 0


def _mask(input_ids: Tensor, attention_mask: Tensor | None, options: Options) -> Tensor:
    """True where a token is no padding, [B, T]. Raises: GenerateError for inputs of the wrong form."""
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise GenerateError(f"input_ids must be integers, got {input_ids.dtype}")
    mask = _inferred_mask(input_ids, options) if attention_mask is None else attention_mask
    if input_ids.dim() != 2 or mask.shape != input_ids.shape:
        raise GenerateError(
            f"input_ids must be [B, T] and attention_mask alike, got {list(input_ids.shape)} and {list(mask.shape)}"
        )
    return mask.bool()


def _inferred_mask(input_ids: Tensor, options: Options) -> Tensor:
    """As Hugging Face has it: pads are padding unless they may also end a row."""
    pad = options.pad_token_id
    if pad is None or pad in options.eos_token_ids:
        return torch.ones_like(input_ids)
    return input_ids != pad
