"""Candidates of the ranks give the choice the whole logits would give."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import generators, on_all, prompts
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from numadist.generation.sampling import (
    Sampling,
    distribution,
    local_candidates,
    merge_candidates,
    num_candidates,
)

VOCABULARY = 101


def split(logits, parts, count):
    """What rank 0 gets when `parts` ranks hold neighbouring parts of the vocabulary, the last one shorter."""
    largest = -(-VOCABULARY // parts)
    starts = range(0, VOCABULARY, largest)
    messages = [local_candidates(logits[:, s : s + largest], count, s, largest) for s in starts]
    return merge_candidates(torch.stack(messages), len(logits))


def random_logits(rows, seed=0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 40, 64, None])
def test_merged_candidates_are_the_best_of_all(parts, count):
    logits = random_logits(4)
    values, tokens = split(logits, parts, count)
    best = logits.sort(-1, descending=True)
    known = VOCABULARY if count is None else count
    assert torch.equal(values[:, :known], best.values[:, :known])
    assert torch.equal(tokens[:, :known], best.indices[:, :known])
    assert bool((values[:, VOCABULARY:] == -torch.inf).all()), "the shorter part is filled with -inf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_of_equal_logits_the_lowest_token_wins_as_in_argmax(parts, dtype):
    logits = torch.zeros(2, VOCABULARY, dtype=dtype)
    logits[1, [20, 60, 90]] = 5.0
    _, tokens = split(logits, parts, 1)
    assert tokens[:, 0].tolist() == [0, 20] == logits.argmax(-1).tolist()


def test_bf16_logits_keep_their_values():
    logits = random_logits(2).bfloat16()
    values, tokens = split(logits, 2, 3)
    assert torch.equal(values[:, 0], logits.float().max(-1).values)
    assert torch.equal(tokens[:, 0], logits.float().argmax(-1))


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 5, 64, 80])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_probabilities_equal_hugging_faces(temperature, top_k, top_p):
    how = Sampling(True, temperature, top_k, top_p)
    logits = random_logits(1)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(-1)[0]
    values, tokens = split(logits, 3, how.num_candidates)
    probabilities, kept = distribution(values[0], tokens[0], how)
    ours = torch.zeros(VOCABULARY).index_put_((kept,), probabilities, accumulate=True)
    assert (ours - expected).abs().max() < 1e-6
    assert torch.equal(ours > 0, expected > 0)


def test_a_batch_asks_for_what_its_most_demanding_row_needs():
    greedy, few, all_ = Sampling(), Sampling(True, top_k=7), Sampling(True, top_k=0)
    assert num_candidates([greedy, greedy]) == 1
    assert num_candidates([greedy, few]) == 7
    assert num_candidates([few, all_, greedy]) is None
    assert num_candidates([Sampling(True, top_k=65)]) is None, "more than 64 are not exchanged as candidates"


@pytest.mark.parametrize("top_k", [0, 40])
def test_sampled_tokens_depend_on_the_seed_only(top_k):
    options = {
        "max_new_tokens": 16,
        "do_sample": True,
        "top_k": top_k,
        "temperature": 0.7,
        "eos_token_id": (),
    }
    answers = {}
    for num_ranks in (1, 2, 3):
        ranks = generators("gpt2", num_ranks)
        for seed in (1, 2):
            outs = on_all(ranks, lambda g, seed=seed: g.generate(prompts(5, 9), seed=seed, **options))
            assert all(out == outs[0] for out in outs), "ranks differ"
            answers.setdefault(seed, outs[0])
            assert outs[0] == answers[seed], f"{num_ranks} ranks sample other tokens than one"
    assert answers[1] != answers[2]


def test_sampling_without_top_k_says_what_it_costs(caplog):
    ranks = generators("gpt2", 2)
    on_all(ranks, lambda g: g.generate(prompts(5), max_new_tokens=1, do_sample=True, top_k=65))
    assert "top_k=65: every rank sends all its logits" in caplog.text
