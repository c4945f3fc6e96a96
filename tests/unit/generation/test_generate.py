"""Tokens equal Hugging Face generate's, for any number of ranks, in batches and alone."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import GEMMA, LIVELY, generators, hugging_face, on_all, prompts, tiny

from numadist import models
from numadist.errors import GenerateError
from numadist.generation.generator import Generator, generate
from numadist.weights.fake import empty_parameters

LENGTHS = (5, 17, 1, 9, 23)
NEW = 24


def expected(name, *lengths):
    """Prompts with the continuations Hugging Face gives them."""
    return [p + hugging_face(name, len(p), NEW) for p in prompts(*lengths)]


CASES = [("llama", 1), ("deepseek", 2), *((name, n) for name in ("gpt2", "llama", "gemma3") for n in (2, 3))]


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_greedy_tokens_equal_hugging_face(name, num_ranks):
    batch = prompts(*LENGTHS)
    answers = expected(name, *LENGTHS)
    ranks = generators(name, num_ranks)
    for out in on_all(ranks, lambda g: g.generate(batch, max_new_tokens=NEW, eos_token_id=())):
        assert out == answers
    for out in on_all(
        ranks, lambda g: [g.generate([p], max_new_tokens=NEW, eos_token_id=())[0] for p in batch]
    ):
        assert out == answers, "alone, not in a batch"


@pytest.mark.parametrize(
    ("name", "blocks", "speakers"),
    [("llama", 1, 3), ("llama, whole head", 0, 1), ("llama, log probabilities", 1, 1)],
)
def test_logits_split_or_whole_give_the_same_tokens(name, blocks, speakers):
    ranks = generators(name, 3)
    assert sum(bool(b.heads) for b in ranks[0].schema.blocks) == blocks
    assert sum(g.runner.vocabulary.size > 0 for g in ranks) == speakers
    batch = [[token % 128 for token in prompt] for prompt in prompts(9, 5)]
    ids = torch.tensor(batch[:1])
    (expected,) = (
        tiny(name)
        .generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        .tolist()
    )
    for out in on_all(ranks, lambda g: g.generate(batch, max_new_tokens=NEW, eos_token_id=())):
        assert out[0] == expected
    sampled = on_all(ranks, lambda g: g.generate(batch, max_new_tokens=4, do_sample=True, top_k=60))
    assert sampled[0] == sampled[1] == sampled[2]


def test_weights_may_come_from_a_checkpoint_by_slices(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    with empty_parameters():
        hollow = models.build("llama-tiny", **LIVELY)
    generator = Generator(hollow, max_length=64, weights=tmp_path)
    out = generator.generate(prompts(9), max_new_tokens=NEW, eos_token_id=())
    assert out == expected("llama", 9)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_more_prompts_than_rows_wait_their_turn(name):
    batch = prompts(*LENGTHS)
    ranks = generators(name, 2, max_batch_size=2)
    for out in on_all(ranks, lambda g: g.generate(batch, max_new_tokens=NEW, eos_token_id=())):
        assert out == expected(name, *LENGTHS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_tensors_are_continued_as_lists_are(side):
    batch = prompts(5, 9, 2)
    ids, mask = torch.full((3, 9), 77), torch.zeros(3, 9, dtype=torch.int64)
    for i, prompt in enumerate(batch):
        where = slice(9 - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[i, where], mask[i, where] = torch.tensor(prompt), 1
    (generator,) = generators("llama", 1)
    out = generator.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=())
    assert out.shape == (3, 9 + NEW)
    assert torch.equal(out[:, :9], ids)
    answers = [hugging_face("llama", n, NEW) for n in (5, 9, 2)]
    assert out[:, 9:].tolist() == answers


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_row_ends_with_its_stop_id_and_is_padded(num_ranks):
    batch = prompts(5, 17)
    answers = [hugging_face("llama", n, NEW) for n in (5, 17)]
    stop = answers[0][7]
    cut = [a[: a.index(stop) + 1] if stop in a else a for a in answers]
    assert len(cut[0]) <= 8
    ranks = generators("llama", num_ranks)
    for out in on_all(ranks, lambda g: g.generate(batch, max_new_tokens=NEW, eos_token_id=stop)):
        assert [o[len(p) :] for p, o in zip(batch, out, strict=True)] == cut
    ids = torch.tensor([batch[0]])
    for out in on_all(ranks, lambda g: g.generate(ids, max_new_tokens=NEW, eos_token_id=[stop, 511])):
        assert out[0, 5:].tolist() == cut[0]


def test_hugging_face_pads_alike():
    batch = torch.tensor(prompts(6)).repeat(2, 1)
    batch[1] += 1
    model = tiny("llama")
    free = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=9, do_sample=False)
    stop = int(free[0, 8])
    options = {"max_new_tokens": 9, "eos_token_id": stop, "pad_token_id": 3}
    theirs = model.generate(batch, attention_mask=torch.ones_like(batch), do_sample=False, **options)
    assert torch.equal(generate(model, batch, **options), theirs)


def test_callback_sees_every_token_on_rank_0():
    batch, seen = prompts(5, 9), []
    ranks = generators("gpt2", 2)
    outs = on_all(
        ranks,
        lambda g: g.generate(
            batch, max_new_tokens=6, eos_token_id=(), on_token=lambda *token: seen.append(token)
        ),
    )
    for row, prompt in enumerate(batch):
        assert [t for r, t in seen if r == row] == outs[1][row][len(prompt) :]
    assert len(seen) == 12


def test_kv_tensors_hold_this_ranks_heads_only():
    whole = generators("llama", 1)[0]
    ranks = generators("llama", 3)
    assert [g.kv_bytes * 3 for g in ranks] == [whole.kv_bytes] * 3, "3 KV heads, one a rank"
    uneven = generators("llama", 2)
    assert [g.kv_bytes * 2 for g in uneven] == [whole.kv_bytes] * 2, "2 + 1 heads, then 1 + 2"
    two_layers_bytes = 2 * 2 * 5 * 3 * 128 * 8 * 4
    assert whole.kv_bytes == two_layers_bytes, "K and V x layers x rows x heads x slots x size x float32"


def test_one_kv_head_is_kept_by_every_rank():
    whole = generators("gemma3", 1)[0]
    assert [g.kv_bytes for g in generators("gemma3", 2)] == [whole.kv_bytes] * 2


def test_weights_are_split_not_copied():
    whole = sum(p.numel() * p.element_size() for p in tiny("llama").parameters())
    ranks = generators("llama", 3)
    assert max(g.local_bytes for g in ranks) < whole / 3 * 1.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": []}, "no prompts"),
        ({"input_ids": [[]]}, "a prompt has no token"),
        ({"input_ids": [[1]], "max_new_tokens": 64}, "1 prompt tokens and 64 new ones are more than the 64"),
        ({"input_ids": [[1]], "max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"input_ids": [[1]], "temperature": 0.0}, "temperature must be positive"),
        ({"input_ids": [[1]], "top_p": 0.0}, "top_p must be above 0"),
        ({"input_ids": [[1]], "top_k": -1}, "top_k must be 0"),
        ({"input_ids": [[1]], "attention_mask": torch.ones(1, 1)}, "lists have their own lengths"),
        ({"input_ids": torch.ones(3, dtype=torch.int64)}, "input_ids must be"),
    ],
)
def test_impossible_calls_are_told_on_every_rank(call, message):
    ranks = impossible_ranks()
    errors = on_all(ranks, lambda g: g.generate(**call))
    assert all(isinstance(e, GenerateError) for e in errors), errors
    assert any(message in str(e) for e in errors), errors


_RANKS = []


def impossible_ranks():
    """Made once: making them is slow, and a refused call must leave them as they were."""
    if not _RANKS:
        _RANKS.extend(generators("gpt2", 2))
    return _RANKS


def test_the_window_of_sliding_layers_is_felt():
    """The comparison with Hugging Face would miss a window that changes nothing."""
    wide = models.build("gemma3-270m", **{**GEMMA, "sliding_window": 64})
    (prompt,) = prompts(23)
    assert generate(wide, [prompt], max_new_tokens=NEW, eos_token_id=())[0] != expected("gemma3", 23)[0]
