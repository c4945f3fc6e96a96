"""Generation under a plan."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import numadist
from numadist.phases.phase import current_phase, use_plan
from numadist.phases.plan import PhasePlan, PlanPair, RankPlan


def test_generation_decodes_with_the_decode_plan_and_gives_the_threads_back():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    generator = numadist.Generator(LlamaForCausalLM(config).eval(), max_batch_size=2, max_length=64)
    prompts, before = [[1, 2, 3], [4, 5]], (current_phase(), torch.get_num_threads())
    wanted = generator.generate(prompts, max_new_tokens=5, eos_token_id=())
    seen = []
    rank = RankPlan((0, 1, 2), 3)
    use_plan(PlanPair(PhasePlan((rank,)), PhasePlan((RankPlan(rank.cpus, 1),))))
    try:
        tokens = generator.generate(
            prompts,
            max_new_tokens=5,
            eos_token_id=(),
            on_token=lambda row, token: seen.append((current_phase().value, torch.get_num_threads())),
        )
    finally:
        use_plan(None)
    assert seen == [("prefill", 3)] * 2 + [("decode", 1)] * 8
    assert tokens == wanted
    assert (current_phase(), torch.get_num_threads()) == before
