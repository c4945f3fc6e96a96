"""Every field of a generation config changes the output as in Hugging Face's generate, or is refused by name."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

import transformers
from rank_threads import generators, hugging_face, on_all, prompts, tiny
from transformers import GenerationConfig

from numadist.errors import GenerateError, TokenIdError
from numadist.generation import options
from numadist.generation.generator import Generator, generate
from numadist.generation.step import capture_step

NEW = 10
_RANKS = []


def ranks():
    """Two, made once."""
    if not _RANKS:
        _RANKS.extend(generators("llama", 2))
    return _RANKS


def free(length=9):
    return hugging_face("llama", length, 24)


def truth(ids, **fields):
    fields = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **fields}
    return tiny("llama").generate(ids, **fields)


def expect(wanted, ids, **fields):
    for out in on_all(ranks(), lambda g: g.generate(ids, **fields)):
        if isinstance(out, BaseException):
            raise out
        assert torch.equal(out, wanted), f"{fields}: {out.tolist()} instead of {wanted.tolist()}"


FIELDS = {
    "repetition_penalty": lambda: {"repetition_penalty": 3.0},
    "repetition_penalty below 1": lambda: {"repetition_penalty": 0.5},
    "suppress_tokens": lambda: {"suppress_tokens": free()[:3]},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": free()[:2]},
    "min_new_tokens": lambda: {"min_new_tokens": 7, "eos_token_id": free()[2]},
    "min_length": lambda: {"min_length": 15, "eos_token_id": free()[2]},
    "min_new_tokens before min_length": lambda: {
        "min_length": 20,
        "min_new_tokens": 1,
        "eos_token_id": free()[2],
    },
    "eos_token_id, a list": lambda: {"eos_token_id": [511, free()[4]]},
    "eos_token_id, a tensor": lambda: {"eos_token_id": torch.tensor([511, free()[4]])},
    "pad_token_id": lambda: {"pad_token_id": 7, "eos_token_id": free()[3]},
    "max_length": lambda: {"max_length": 13, "max_new_tokens": None},
    "max_new_tokens before max_length": lambda: {"max_length": 13},
    "none of both": lambda: {"max_new_tokens": None},
    "several": lambda: {"repetition_penalty": 1.3, "suppress_tokens": free()[:1], "min_new_tokens": 3},
    "sampling of one token": lambda: {"do_sample": True, "top_k": 1, "repetition_penalty": 2.0},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_obeyed_as_argument_and_in_either_config(name, monkeypatch):
    ids = torch.tensor([*prompts(9), *prompts(9)])
    ids[1] += 1
    fields = {"max_new_tokens": NEW, "pad_token_id": 0, **FIELDS[name]()}
    fields = {key: value for key, value in fields.items() if value is not None}
    wanted = truth(ids, **fields)
    expect(wanted, ids, **fields)
    expect(wanted, ids, generation_config=GenerationConfig(**fields))
    for field, value in fields.items():
        monkeypatch.setattr(tiny("llama").generation_config, field, value)
    expect(wanted, ids)


def test_arguments_win_over_the_calls_config_and_that_over_the_models(monkeypatch):
    ids = torch.tensor(prompts(9))
    monkeypatch.setattr(tiny("llama").generation_config, "repetition_penalty", 3.0)
    monkeypatch.setattr(tiny("llama").generation_config, "max_new_tokens", 3)
    own = GenerationConfig(repetition_penalty=1.5, max_new_tokens=5)
    expect(truth(ids), ids)
    expect(truth(ids, repetition_penalty=1.5, max_new_tokens=5), ids, generation_config=own)
    expect(
        truth(ids, repetition_penalty=1.0, max_new_tokens=7),
        ids,
        generation_config=own,
        repetition_penalty=1.0,
        max_new_tokens=7,
    )


def test_the_plain_greedy_path_sends_nothing_more():
    sent = []
    (first, _) = ranks()
    broadcast = first.peers.broadcast
    copied = copy.copy(first.runner)
    object.__setattr__(first.peers, "broadcast", lambda x: (sent.append(x), broadcast(x)))
    try:
        counts = []
        for penalty in (1.0, 2.0):
            sent.clear()
            on_all(
                ranks(),
                lambda g, p=penalty: g.generate(
                    prompts(5), max_new_tokens=4, eos_token_id=(), repetition_penalty=p
                ),
            )
            counts.append(len(sent))
    finally:
        object.__setattr__(copied.peers, "broadcast", broadcast)
    # A command for each of 4 steps, the prompt, the end, and the answer in two parts; edits are one more a step.
    assert counts == [8, 12]


@pytest.mark.parametrize(
    ("pad", "eos"), [(7, 1), (7, 7), (None, 7), (7, ()), (None, ())], ids=lambda ids: f"{ids}"
)
def test_pads_without_a_mask_are_told_as_hugging_face_tells_them(pad, eos):
    ids = torch.tensor([*prompts(9), *prompts(9)])
    ids[1, :4] = 7
    model = tiny("llama")
    wanted = model.generate(
        ids,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=pad,
        eos_token_id=None if eos == () else eos,
    )
    expect(wanted, ids, max_new_tokens=NEW, pad_token_id=pad, eos_token_id=eos)


# Fields that change no token: how Hugging Face computes, or what only counts with a field that is refused.
HARMLESS = {
    "early_stopping",
    "length_penalty",
    "diversity_penalty",
    "use_cache",
    "cache_config",
    "max_cache_len",
    "renormalize_logits",
    "bos_token_id",
    "decoder_start_token_id",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "speculation_type",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "low_memory",
    "prefill_chunk_size",
    "transformers_version",
}
OBEYED = {
    *(
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "do_sample",
    ),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "pad_token_id", "eos_token_id", "cache_implementation"),
}
REFUSED = {**options._REFUSED, **options._REFUSED_SAMPLING, **options._REFUSED_GREEDY}


def test_every_field_there_is_has_been_thought_of():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields <= HARMLESS | OBEYED | set(REFUSED), "a new one of transformers"


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_we_do_not_have_is_refused_by_name(name):
    value = [[3]] if name in ("bad_words_ids", "force_words_ids") else 2
    sampling = name in options._REFUSED_SAMPLING
    with pytest.raises(GenerateError, match=rf"{name}=.* of generate\(\) would change the output"):
        options.decide({name: value, "do_sample": sampling}, None, None)
    own = GenerationConfig()
    setattr(own, name, value)
    with pytest.raises(GenerateError, match=f"{name}=.* of the model's generation_config"):
        options.decide({"do_sample": sampling}, None, own)
    for harmless in REFUSED[name]:
        options.decide({name: harmless, "do_sample": sampling}, None, own)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beems": 2}, "generate takes no argument 'num_beems'; did you mean num_beams"),
        ({"streamer": object()}, "numadist's generate has no streamer"),
        ({"eos_token_id": "x"}, r"eos_token_id='x' of generate\(\) is no token id"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 .* is no int"),
        ({"stop_strings": "x"}, "stop_strings='x' .* need the model's tokenizer"),
        ({"max_length": 2}, "max_length=2 leaves no room behind a prompt of 9 tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_refusal_is_a_sentence(fields, message):
    first, second = on_all(ranks(), lambda g: g.generate(torch.tensor(prompts(9)), **fields))
    assert isinstance(second, GenerateError)
    with pytest.raises(GenerateError, match=message):
        raise first


def test_only_rank_0s_arguments_count():
    ids = torch.tensor(prompts(9))
    wanted = truth(ids, max_new_tokens=NEW)

    def work(g):
        if g.rank == 0:
            return g.generate(ids, max_new_tokens=NEW, eos_token_id=())
        return g.generate(
            [[1], [2, 3]], max_new_tokens=3, eos_token_id=5, seed=9, temperature=-1, num_beams=4
        )

    for out in on_all(ranks(), work):
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("token", [512, -1])
def test_a_token_outside_the_vocabulary_is_an_index_error_by_name(token):
    first, second = on_all(ranks(), lambda g: g.generate([[3, token]]))
    assert isinstance(second, GenerateError)
    assert isinstance(first, TokenIdError)
    assert isinstance(first, IndexError)
    assert f"token {token} at place 1 of a prompt is outside the model's vocabulary of 512" in str(first)


def test_stop_strings_end_a_row_where_hugging_face_ends_it():
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(a + b for a in "stopx" for b in letters)][:512]
    raw = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    raw.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    ids = torch.tensor(prompts(9))
    text = [words[i] for i in free()]
    for stop in (text[3], text[2][-1:] + text[3][:1], [text[6], "never"]):
        wanted = truth(ids, max_new_tokens=NEW, stop_strings=stop, tokenizer=tokenizer)
        assert wanted.shape[1] < 9 + NEW, "it stops early"
        expect(wanted, ids, max_new_tokens=NEW, stop_strings=stop, tokenizer=tokenizer, eos_token_id=())


SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_alibi_is_refused_in_a_sentence():
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**SMALL, alibi=True)).eval()
    with pytest.raises(GenerateError, match="FalconForCausalLM has alibi=True"):
        Generator(model, max_length=32)


def test_a_model_that_fails_with_our_cache_is_named():
    model = copy.deepcopy(tiny("llama"))
    model.model.layers[0].forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(GenerateError, match=r"LlamaForCausalLM fails when .* ZeroDivisionError"):
        capture_step(model)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_model_in_training_mode_is_refused_if_it_draws(dropout):
    config = transformers.LlamaConfig(**SMALL, intermediate_size=96, attention_dropout=dropout)
    model = transformers.LlamaForCausalLM(config).train()
    if dropout:
        with pytest.raises(GenerateError, match=r"in training mode: call model.eval\(\)"):
            capture_step(model)
    else:
        capture_step(model)


def test_generate_without_a_generator_makes_room_for_what_the_config_asks(monkeypatch):
    ids = torch.tensor(prompts(9))
    wanted = truth(ids, max_new_tokens=30)
    assert torch.equal(
        generate(tiny("llama"), ids, generation_config=GenerationConfig(max_new_tokens=30)), wanted
    )
