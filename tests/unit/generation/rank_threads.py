"""Generators of all ranks in one process, a thread a rank; and models whose text is not one word again and again."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers
from lockstep import Board

from numadist import models
from numadist.generation.generator import Generator
from numadist.generation.peers import Peers, alone
from numadist.generation.step import CapturedStep, capture_step

# Random weights of the usual scale make a model that repeats its first token; these make it walk about.
LIVELY = {"initializer_range": 0.4}
GEMMA = {
    "initializer_range": 0.2,
    "tie_word_embeddings": False,  # tied, its scaled embeddings outweigh everything: it repeats its last token
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 7,
    "vocab_size": 512,
}
DEEPSEEK = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


@functools.cache
def tiny(name: str) -> torch.nn.Module:
    """gpt2 (heads of their own), llama (3 KV heads for 9), gemma3 (one KV head, windows of 7 tokens), deepseek (one
    latent key for all heads, experts).

    llama, whole head: a vocabulary too short to be split. llama, log probabilities: what follows the split head looks
    across the vocabulary.
    """
    if name == "deepseek":
        config = transformers.DeepseekV3Config(**DEEPSEEK, **LIVELY)
        torch.manual_seed(models.SEED)
        return transformers.AutoModelForCausalLM.from_config(config).eval()
    if name == "gemma3":
        return models.build("gemma3-270m", **GEMMA)
    if name == "llama, whole head":
        return models.build("llama-tiny", vocab_size=128, **LIVELY)
    if name == "llama, log probabilities":
        model = models.build("llama-tiny", **LIVELY)
        model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.LogSoftmax(-1))
        return model
    return models.build(f"{name}-tiny", **LIVELY)


def prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


@functools.cache
def captured(name: str) -> CapturedStep:
    return capture_step(tiny(name))


def peers_of(num_ranks: int) -> list[Peers]:
    """Of ranks that are threads."""
    if num_ranks == 1:
        return [alone()]
    board = Board(num_ranks)

    def of_rank(rank: int) -> Peers:
        return Peers(
            rank,
            num_ranks,
            board.emitter(rank),
            lambda x: torch.stack(board._exchange(x, rank)),
            lambda x: x.copy_(board._exchange(x.clone(), rank)[0]),  # the sender may write to x again
            lambda schema: None,
        )

    return [of_rank(rank) for rank in range(num_ranks)]


def generators(name: str, num_ranks: int, **options: Any) -> list[Generator]:
    """One Generator a rank, of the tiny model `name`."""
    options = {"max_batch_size": 5, "max_length": 64, **options}
    return [
        Generator.of_captured(tiny(name), copy.deepcopy(captured(name)), peers, **options)
        for peers in peers_of(num_ranks)
    ]


def on_all(ranks: list[Generator], work: Callable[[Generator], Any]) -> list[Any]:
    """work(generator) in every rank's thread: what it returned, or the exception it raised."""
    results: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = work(ranks[rank])
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@functools.cache
def hugging_face(name: str, length: int, max_new_tokens: int) -> list[int]:
    """Continuation of the prompt of this length by Hugging Face's own loop, alone and without padding."""
    ids = torch.tensor(prompts(length))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max_new_tokens}
    new = tiny(name).generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()
    assert len(set(new)) > max_new_tokens // 6, f"{name} is too dull a model to test with: {new}"
    return new
