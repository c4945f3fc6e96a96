"""Text token by token is the text of one decode of all, for every kind of tokenizer."""

import random

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from numadist.generation.streamed_text import StreamedText

WORDS = [
    "the cat's on a mat , isn't it ?",
    "na\u00efve caf\u00e9 \u4f60\u597d \u4e16\u754c",
    "\U0001f600\U0001f44d ok.",
    "  two  spaces\n\tand  lines ",
    "we 've seen it ; they 're ' here ' !",
]
SPECIAL = ["<s>", "</s>", "<unk>"]


def byte_level():
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(WORDS, trainer)
    return made


def sentencepiece():
    """As Llama's: words begin with a mark, unknown letters are bytes, the first space is dropped."""
    pieces = [
        "\u2581",
        "\u2581the",
        "\u2581ca",
        "t",
        "s",
        "\u2581.",
        "\u2581\u2581",
        "\u4f60",
        "\ufffd",
        "a\u2581b",
    ]
    names = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    vocabulary = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    made.decoder = decoders.Sequence(steps)
    return made


def unigram():
    pieces = [*SPECIAL, "\u2581", "\u2581the", "\u2581ca", "t", "s", "\u4f60", "."]
    made = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def word_piece():
    pieces = [*SPECIAL, "the", "##s", "##ing", ".", ",", "'", "n't", "'s", "a", "cat", "\u4f60"]
    made = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def words():
    pieces = [*SPECIAL, "the", "cat", ".", "\u4f60"]
    return tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))


KINDS = [byte_level, sentencepiece, unigram, word_piece, words]


def tokenizer_of(kind, cleans=False):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=kind(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=cleans,
    )


def streamed(tokenizer, tokens) -> list[str]:
    text = StreamedText(tokenizer)
    return [*(text.put(token) for token in tokens), text.end()]


@pytest.mark.parametrize("cleans", [False, True], ids=["plain", "cleaned"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_tokens_give_the_text_of_all(kind, cleans):
    tokenizer, draw = tokenizer_of(kind, cleans), random.Random(7)
    size = len(tokenizer)
    for _ in range(300):
        few = [draw.randrange(size) for _ in range(draw.randrange(1, 12))]  # so that some repeat
        tokens = [draw.choice(few) for _ in range(draw.randrange(1, 40))]
        parts = streamed(tokenizer, tokens)
        assert "".join(parts) == tokenizer.decode(tokens, skip_special_tokens=True), tokens


@pytest.mark.parametrize("kind", [byte_level, sentencepiece], ids=lambda kind: kind.__name__)
def test_a_letter_comes_once_all_its_bytes_are_there(kind):
    tokenizer = tokenizer_of(kind)
    letter = {"byte_level": "\U0001f44c", "sentencepiece": "\u00e9"}[kind.__name__]
    names = {"sentencepiece": ["<0xC3>", "<0xA9>", "t"]}.get(kind.__name__)
    tokens = tokenizer.convert_tokens_to_ids(names) if names else tokenizer(letter)["input_ids"]
    parts = streamed(tokenizer, tokens)
    assert "".join(parts).removesuffix("t") == letter
    assert all("\ufffd" not in part for part in parts)


def test_the_work_grows_with_the_tokens_not_their_square():
    tokenizer = tokenizer_of(byte_level)
    tokens = tokenizer(" ".join(WORDS) * 40)["input_ids"]
    decode, counted = tokenizer.decode, []

    class Counting:
        all_special_ids = tokenizer.all_special_ids
        convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

        def decode(self, ids, **options):
            counted.append(len(ids))
            return decode(ids, **options)

    assert "".join(streamed(Counting(), tokens)) == decode(tokens, skip_special_tokens=True)
    assert sum(counted) < 12 * len(tokens)
