"""What a call of generate does, from its arguments and two generation configs: each field is obeyed or refused by name.

Arguments win over the `generation_config` of the call, that one over the model's own, as in Hugging Face's generate.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import StopStringCriteria

from numadist.errors import GenerateError
from numadist.generation.logits import Rules
from numadist.generation.sampling import Sampling

# New tokens where nobody says how many.
DEFAULT_NEW_TOKENS = 20

# Fields that would change the output and that we do not have -> the values, besides None, that change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
    "use_mtp": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "dola_layers": (),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
    "return_dict_in_generate": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}
# The same, where they only count for sampling, or only without it.
_REFUSED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0, 1.0),
    "eta_cutoff": (0.0, 1.0),
    "top_h": (),
}
_REFUSED_GREEDY: dict[str, tuple[Any, ...]] = {"penalty_alpha": (0.0,)}
# Arguments of Hugging Face's generate that are no fields; None is the value that changes nothing.
_NO_FIELDS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "assistant_tokenizer",
    "streamer",
    "negative_prompt_ids",
    "inputs_embeds",
    "past_key_values",
    "custom_generate",
)


@dataclass(frozen=True)
class Options:
    """One call's fields, all decided. width: tokens of a prompt, its padding included, as Hugging Face counts."""

    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    max_time: float | None
    stops: StopStringCriteria | None
    repetition_penalty: float
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    lengths: Mapping[str, int | None]
    position_limit: int | None

    def max_new_tokens(self, width: int) -> int:
        if (new := self.lengths["max_new_tokens"]) is not None:
            return new
        if (total := self.lengths["max_length"]) is not None:
            if total <= width:
                raise GenerateError(
                    f"max_length={total} leaves no room behind a prompt of {width} tokens; set max_new_tokens"
                )
            return total - width
        if self.position_limit is None:
            return DEFAULT_NEW_TOKENS
        return min(DEFAULT_NEW_TOKENS, max(1, self.position_limit - width))

    def rules(self, given: Sequence[int], width: int) -> Rules | None:
        """What changes the logits of a row; None: nothing does.

        given: the tokens of its prompt that count as said. width: how many it has with its padding.
        """
        least = self.lengths["min_new_tokens"]
        if least is None:
            least = max(0, (self.lengths["min_length"] or 0) - width)
        rules = Rules(
            self.repetition_penalty,
            self.suppress_tokens,
            self.begin_suppress_tokens,
            least if self.eos_token_ids else 0,
            self.eos_token_ids if least else (),
            tuple(sorted(set(given))) if self.repetition_penalty != 1.0 else (),
        )
        return None if rules == Rules() else rules


class _Fields:
    """A field's value, from whoever says something of it first."""

    def __init__(self, arguments: Mapping[str, Any], own: Any, models: Any):
        self.sources = [
            ("generate()", arguments),
            ("the generation_config of this call", vars(own) if own is not None else {}),
            ("the model's generation_config", vars(models) if models is not None else {}),
        ]

    def find(self, name: str) -> tuple[Any, str]:
        for where, source in self.sources:
            if (value := source.get(name)) is not None:
                return value, where
        return None, ""

    def number(self, name: str, kind: type, default: Any = None) -> Any:
        value, where = self.find(name)
        if value is None:
            return default
        try:
            number = kind(value.item() if hasattr(value, "item") else value)
            if kind is int and number != value:
                raise ValueError
        except (TypeError, ValueError, RuntimeError) as error:
            raise GenerateError(f"{name}={value!r} of {where} is no {kind.__name__}") from error
        return number

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, given as a number, a list or a tensor."""
        value, where = self.find(name)
        if value is None:
            return ()
        if isinstance(value, Tensor):
            value = value.tolist()
        try:
            return tuple(int(i) for i in (value if isinstance(value, Iterable) else [value]))
        except (TypeError, ValueError) as error:
            raise GenerateError(f"{name}={value!r} of {where} is no token id and no list of them") from error

    def refuse(self, refused: Mapping[str, tuple[Any, ...]]) -> None:
        for name, neutral in refused.items():
            value, where = self.find(name)
            if value is not None and value not in neutral:
                harmless = " or ".join(map(repr, neutral)) or "None"
                raise GenerateError(
                    f"{name}={value!r} of {where} would change the output, and numadist does not have it. Set it to "
                    f"{harmless}, or use Hugging Face's generate"
                )


def decide(
    arguments: Mapping[str, Any],
    generation_config: Any,
    models: Any,
    tokenizer: Any = None,
    position_limit: int | None = None,
) -> Options:
    """arguments: fields by name, None where not given; models: the model's generation_config. Raises: GenerateError."""
    _check_names(arguments)
    fields = _Fields(arguments, generation_config, models)
    do_sample = bool(fields.find("do_sample")[0])
    fields.refuse(_REFUSED)
    fields.refuse(_REFUSED_SAMPLING if do_sample else _REFUSED_GREEDY)
    if fields.find("cache_implementation")[0] == "quantized":
        fields.refuse({"cache_implementation": ()})
    eos, pad = fields.ids("eos_token_id"), fields.ids("pad_token_id") or fields.ids("eos_token_id")
    # Without sampling only what the caller says of it is looked at: configs carry settings for both.
    drawn = fields if do_sample else _Fields(arguments, None, None)
    return Options(
        sampling=Sampling(
            do_sample,
            drawn.number("temperature", float, 1.0),
            drawn.number("top_k", int, 50),
            drawn.number("top_p", float, 1.0),
            drawn.number("min_p", float, 0.0),
        ),
        eos_token_ids=eos,
        pad_token_id=pad[0] if pad else None,
        max_time=fields.number("max_time", float),
        stops=_stops(fields, tokenizer),
        repetition_penalty=fields.number("repetition_penalty", float, 1.0),
        suppress_tokens=fields.ids("suppress_tokens"),
        begin_suppress_tokens=fields.ids("begin_suppress_tokens"),
        lengths={
            name: fields.number(name, int)
            for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
        },
        position_limit=position_limit,
    )


def _check_names(arguments: Mapping[str, Any]) -> None:
    known = vars(GenerationConfig())  # type: ignore[no-untyped-call]
    for name, value in arguments.items():
        if name in _NO_FIELDS and value is not None:
            raise GenerateError(f"numadist's generate has no {name}; use Hugging Face's generate for it")
        if name not in known and name not in _NO_FIELDS:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise GenerateError(f"generate takes no argument {name!r}{hint}")


def _stops(fields: _Fields, tokenizer: Any) -> StopStringCriteria | None:
    strings, where = fields.find("stop_strings")
    if not strings:
        return None
    if tokenizer is None:
        raise GenerateError(
            f"stop_strings={strings!r} of {where} need the model's tokenizer: generate(..., tokenizer=tokenizer)"
        )
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
