"""Random models, trained by random loops: gradients and parameters are the unsharded model's."""

import functools
import random
import sys
from pathlib import Path

import pytest
import torch
from pool import ranks
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers", reason="needs the extra `models`")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sharding"))
import zoo

from numadist.pipeline.whole import gather_whole

VOCAB = 101
# Of sums in another order; transformers' norms compute in float32 whatever the model's dtype. torch has no grouped
# product in float64, which experts need.
TOLERANCE = {torch.float64: {"rtol": 1e-5, "atol": 1e-6}, torch.float32: {"rtol": 1e-3, "atol": 2e-5}}


def decoder(draw: random.Random) -> dict:
    heads = draw.choice([2, 3, 4, 6, 9])
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        "intermediate_size": draw.choice([33, 48, 64, 70]),
        "num_hidden_layers": draw.choice([1, 2]),
        "tie_word_embeddings": draw.random() < 0.5,
        "pad_token_id": draw.choice([0, 5, VOCAB - 1]),
    }


def causal(model_class: str, config_class: str, **more):
    def build(draw: random.Random) -> nn.Module:
        config = decoder(draw)
        if "num_local_experts" in more:  # torch's grouped product wants rows of whole 16 bytes
            config["intermediate_size"] = draw.choice([48, 64, 68])
        return zoo.hf(model_class, config_class, **{**config, **more})()

    return build


def gpt2(draw: random.Random) -> nn.Module:
    heads = draw.choice([2, 3, 4])
    config = {"n_layer": 2, "n_embd": heads * 8, "n_head": heads, "n_positions": 32, "vocab_size": VOCAB}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return zoo.hf(
        "GPT2LMHeadModel", "GPT2Config", **config, **rates, tie_word_embeddings=draw.random() < 0.5
    )()


class Written(nn.Module):
    """What a user writes by hand: norms before or after, fused or separate projections, tied or not, gates, scales."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.heads, self.size = draw.choice([2, 3, 4]), draw.choice([4, 8])
        width, hidden = self.heads * self.size, draw.choice([20, 32, 45])
        bias = draw.random() < 0.5
        self.table = nn.Embedding(VOCAB, width, padding_idx=draw.choice([None, 0, 7, VOCAB - 1]))
        self.norms = nn.ModuleList(draw.choice([nn.LayerNorm, nn.RMSNorm])(width) for _ in range(3))
        self.fused, self.before, self.gated = (draw.random() < 0.5 for _ in range(3))
        if self.fused:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.out = nn.Linear(width, width, bias=draw.random() < 0.5)
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        if self.gated:
            self.gate = nn.Linear(width, hidden, bias=bias)
        self.scale = nn.Parameter(torch.ones(width)) if draw.random() < 0.5 else None
        self.act = draw.choice([F.gelu, F.silu, F.relu, torch.tanh])
        self.looped = draw.choice([1, 2])  # the same layer, used twice
        self.head = None if draw.random() < 0.4 else nn.Linear(width, VOCAB, bias=bias)
        if self.head is not None and draw.random() < 0.4:
            self.head.weight = self.table.weight

    def attention(self, x):
        projected = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for t in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def mlp(self, x):
        h = self.act(self.gate(x)) * self.up(x) if self.gated else self.act(self.up(x))
        y = self.down(h)
        return y if self.scale is None else y * self.scale

    def forward(self, input_ids, use_cache=False):
        x = self.table(input_ids)
        for _ in range(self.looped):
            for part, norm in ((self.attention, self.norms[0]), (self.mlp, self.norms[1])):
                x = x + part(norm(x)) if self.before else norm(x + part(x))
        x = self.norms[2](x)
        return x if self.head is None else self.head(x)


MODELS = {
    "llama": causal("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "gemma3": causal("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=4),
    "mixtral": causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "gpt2": gpt2,
    "written": Written,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
}


def made(seed: int):
    """(its name, the model, a random part of it frozen)"""
    draw = random.Random(seed)
    name = draw.choice([*sorted(MODELS), "written"])
    torch.manual_seed(seed)
    model = MODELS[name](draw).to(torch.float32 if name == "mixtral" else torch.float64).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    rate = draw.choice([0.0, 0.0, 0.3, 0.7])
    frozen = [p for p in model.parameters() if draw.random() < rate]
    for p in frozen[1:]:  # one at least trains
        p.requires_grad_(False)
    return name, model


class Loop:
    """Steps with accumulated gradients, clipped or not, of a random optimizer."""

    def __init__(self, seed: int):
        draw = random.Random(-seed - 1)
        self.optimizer = draw.choice(sorted(OPTIMIZERS))
        self.clip = draw.choice([None, (0.1, 2.0), (0.1, 1.0), (0.01, float("inf"))])
        self.num_parts, self.set_to_none = draw.choice([1, 2]), draw.random() < 0.5
        self.batches = [
            torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(i)) for i in range(4)
        ]

    def run(self, model, gradients) -> list[torch.Tensor]:
        """Calls gradients(model) after the first backward. Returns the norms of the steps."""
        optimizer = OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])
        norms = []
        for step in range(2):
            optimizer.zero_grad(set_to_none=self.set_to_none)
            for ids in self.batches[step : step + self.num_parts]:
                out = zoo.main_output(model(input_ids=ids, use_cache=False))
                target = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).sin().view_as(out)
                ((out - target) ** 2).mean().backward()
            if step == 0:
                gradients(model)
            if self.clip is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), *self.clip))
            optimizer.step()
        return norms


def named_grads(model):
    return {
        n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None
    }


def whole_grads(sharded):
    """By name, whole. Collective."""
    return {
        n: gather_whole(g, sharded.placement(n), sharded.rank, sharded.group)
        for n, g in named_grads(sharded.local).items()
    }


def assert_close(told, what, value, wanted, **tolerance):
    torch.testing.assert_close(value, wanted, **tolerance, msg=lambda m: f"{told}: {what}: {m}")


def check(rank, world, seed):
    import numadist

    name, plain = made(seed)
    loop, ids = Loop(seed), torch.arange(2, 14).view(2, 6)
    sharded = numadist.shard(made(seed)[1], {"input_ids": ids, "use_cache": False}, train=True)
    ours, wanted = {}, {}
    norms = loop.run(sharded, lambda m: ours.update(whole_grads(m)))
    wanted_norms = loop.run(plain, lambda m: wanted.update(named_grads(m)))
    told = f"seed {seed}, {name}, {loop.optimizer}, clip {loop.clip}"
    close = functools.partial(assert_close, told, **TOLERANCE[next(plain.parameters()).dtype])
    assert ours, f"{told}: nothing has a gradient"
    for n, grad in ours.items():
        close(f"gradient of {n}", grad, wanted[n])
    close("norms", norms, wanted_norms)
    state = plain.state_dict()
    for n, value in sharded.state_dict().items():
        close(f"{n} after the steps", value, state[n])
    lacking = {n for n, _ in sharded.local.named_parameters()} & set(wanted) - set(ours)
    assert not lacking, f"{told}: no gradient of {lacking}"
    return len(sharded.schema.param_shards())


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda world: f"{world}ranks")
def world(request):
    with ranks(request.param) as started:
        yield started


@pytest.mark.mp
@pytest.mark.parametrize(
    "seeds",
    [
        range(3),
        pytest.param(range(3, 30), marks=pytest.mark.slow),
        pytest.param(range(30, 3000), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_random_models_train_as_unsharded(world, seeds):
    num_sharded = [min(world.run(check, seed)) for seed in seeds]
    assert min(num_sharded) > 0, num_sharded
