"""Whatever causal language model is given: Hugging Face's tokens, or an error that says why not."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

import transformers
from causal_zoo import MODELS, REFUSED
from rank_threads import on_all, peers_of, prompts

from numadist.errors import NumadistError
from numadist.generation.generator import Generator
from numadist.generation.step import capture_step

pytestmark = pytest.mark.nightly
NEW = 16


def build(name, options):
    """The model in eval mode, with one-dimensional parameters moved off their trivial values."""
    classes = (name.removesuffix("Text") + suffix for suffix in ("ForCausalLM", "LMHeadModel"))
    made = next(c for c in (getattr(transformers, n, None) for n in classes) if c is not None)
    torch.manual_seed(0)
    model = made(getattr(transformers, f"{name}Config")(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def continued(model, prompt):
    """By Hugging Face, alone and without padding."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_hugging_faces_on_one_rank_and_on_two(name):
    model = build(name, MODELS[name])
    batch = [[2 + token % 250 for token in prompt] for prompt in prompts(5, 17, 1, 9)]
    wanted = [continued(model, prompt) for prompt in batch]
    step = capture_step(model)
    for num_ranks in (1, 2):
        options = {"max_batch_size": len(batch), "max_length": 64}
        ranks = [Generator.of_captured(model, copy.deepcopy(step), p, **options) for p in peers_of(num_ranks)]
        for out in on_all(ranks, lambda g: g.generate(batch, max_new_tokens=NEW, eos_token_id=())):
            assert out == wanted, f"{num_ranks} ranks"
    assert max(g.local_bytes for g in ranks) < 0.67 * sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_generated_with_is_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises(NumadistError, match=message):
        Generator(build(name, options), max_batch_size=4, max_length=64)
