"""`numadist generate`, run as a user does, on ranks that it starts itself."""

import re
import subprocess
import sys

import pytest
import torch
from numarun_process import LIMIT_S, needs_two_cores

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
import tokenizers

from numadist import models

pytestmark = [pytest.mark.mp, needs_two_cores]

WORDS = ["<s>", "<pad>", *(f"w{i}" for i in range(62))]
PROMPT = "w3 w14 w15 w9 w2 w6"
TEMPLATE = "{% for m in messages %}w40 {{ m['content'] }} w41{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model and a tokenizer of whole words."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(dict(zip(WORDS, range(64), strict=True)), "<pad>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(path)
    return path


def generate(model, *options, stdin=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "numadist", "generate", str(model), "--quiet", *options]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=LIMIT_S)


def hugging_face(folder, prompt: str, num_tokens: int) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return tokenizer.decode(model.generate(ids, max_new_tokens=num_tokens)[0, ids.shape[1] :])


def test_one_rank_and_two_print_what_hugging_face_generates(folder):
    wanted = hugging_face(folder, PROMPT, 9)
    one = generate(folder, "--max-new-tokens", "9", "--ranks", "1", stdin=PROMPT)
    two = generate(folder, "--max-new-tokens", "9", "--ranks", "2", "--prompt", PROMPT, "--stats")
    assert (one.stdout, one.stderr) == (f"{wanted}\n", "")
    assert two.stdout == f"{wanted}\n"
    for line in (
        "first token ",
        r"then .* tokens/s, 9 tokens in all",
        r"rank 0 .*pages: ",
        r"rank 1 .*pages: ",
    ):
        assert re.search(line, two.stderr), two.stderr


def test_chat_puts_the_prompt_into_the_template(folder):
    wanted = hugging_face(folder, f"w40 {PROMPT} w41", 5)
    done = generate(folder, "--max-new-tokens", "5", "--ranks", "1", "--chat", "--prompt", PROMPT)
    assert (done.stdout, done.stderr) == (f"{wanted}\n", "")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--prompt", ""], 1, "no prompt: give --prompt TEXT"),
        (["--prompt", "w1", "--ranks", "0"], 1, "--ranks must be at least 1, got 0"),
        (["--temperature", "warm"], 2, "argument --temperature: invalid float value"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_a_sentence(folder, options, code, message):
    done = generate(folder, *options)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_knows_the_capital_of_france():
    said = [
        generate(
            models.smollm2_path(), "--prompt", "The capital of France is", "--max-new-tokens", "12", *ranks
        )
        for ranks in (["--ranks", "1"], ["--ranks", "2"])
    ]
    assert said[0].stdout.startswith(" Paris."), said[0].stderr
    assert said[1].stdout == said[0].stdout, said[1].stderr
