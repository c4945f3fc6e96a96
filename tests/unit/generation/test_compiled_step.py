"""The compiled step: same tokens, one copy of the weights for both phases, no compilation for new sizes."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import generators, hugging_face, prompts

from numadist import _native_kernels
from numadist.kernels import skinny
from numadist.lowering.one_token_attention import one_token_attention
from numadist.lowering.packing import can_pack
from numadist.lowering.recorded_step import ReplayedStep

NEW = 24


def check(generator, name, lengths):
    out = generator.generate(prompts(*lengths), max_new_tokens=NEW, eos_token_id=())
    assert [o[n:] for n, o in zip(lengths, out, strict=True)] == [hugging_face(name, n, NEW) for n in lengths]


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        pytest.param("gpt2", (5, 17), [(1, 9, 23, 5, 17), (90, 5)], marks=pytest.mark.slow),
        ("llama", (9,), [(23,), (2,), (90,)]),
    ],
    ids=["gpt2, several rows", "llama, one row"],
)
def test_compiled_tokens_equal_hugging_face_and_new_sizes_compile_nothing(name, first, others):
    (generator,) = generators(name, 1, max_length=200, compile=True)
    check(generator, name, first)
    compiled = generator.runner._forward
    programs = [p for found in compiled.programs.values() for p in found]
    assert len(programs) == 2, "one program reads prompts, one decodes"
    assert [p.num_compiled for p in programs] == [3, 3], (
        "what precedes the layers, a layer, what follows them"
    )
    assert [len(p.modules) for p in programs] == [4, 4], "the layer is called twice"
    step = compiled._ready[len(first) == 1, True, False]
    # The small Llama has heads of 8 and layers of 72 inputs, which stay with torch.
    packed = compiled.decode.packed_0
    recorded = name == "gpt2" and skinny.panel_width(packed) is not None
    assert isinstance(step, ReplayedStep) == recorded
    assert not recorded or step.num_replayed == NEW - 1 - 2, "the first step compiles, the next is recorded"
    for lengths in others:
        check(generator, name, lengths)
    programs = [p for found in compiled.programs.values() for p in found]
    assert len(programs) == 2, "a new number of rows, tokens or slots compiled anew"


def test_both_phases_hold_the_same_weights_once():
    whole = generators("llama", 1)[0]
    (generator,) = generators("llama", 1, compile=True)
    step = generator.runner._forward
    assert can_pack(torch.float32), "this machine's oneDNN packs nothing"
    prefill, decode = (dict(phase.named_buffers()) for phase in (step.prefill, step.decode))
    packed = [name for name in prefill if name.startswith("packed_")]
    assert len(packed) == 2 * 7 + 1, "7 linear layers in each of 2 layers, and the head"
    assert all(prefill[name] is decode[name] for name in packed)
    plain = dict(step.prefill.named_parameters())
    assert all(p is dict(step.decode.named_parameters())[name] for name, p in plain.items())
    assert [name for name, p in plain.items() if p.dim() > 1] == ["model.model.embed_tokens.weight"]
    held = sum(p.numel() for p in plain.values()) + sum(prefill[name].numel() for name in packed)
    assert held * 4 == whole.local_bytes


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_attention_of_several_rows_reads_the_cache_itself(name, monkeypatch):
    """Not a copy of it, although its rows lie further apart than the slots that are in use are long."""
    (generator,) = generators(name, 1, max_length=200, compile=True)
    cache = generator.runner.kv.tensors
    assert cache[0].shape[2] > 64, "rows follow each other as they are read, so none would be copied"
    read = []

    def attention(*args):
        read.extend(args[4:6])  # of keys and values
        return native_attention(*args)

    native_attention = _native_kernels.attention
    monkeypatch.setattr(_native_kernels, "attention", attention)
    generator.generate(prompts(5, 17), max_new_tokens=3, eos_token_id=())
    assert len(read) > 2 * len(cache), "a prompt each row, and a step"
    assert all(any(0 <= at - t.data_ptr() < t.nbytes for t in cache) for at in read)


def test_eager_phases_run_one_graph():
    (generator,) = generators("llama", 1)
    assert generator.runner._forward is generator.runner.part.gm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (4, 1)])
@pytest.mark.parametrize("additive", [False, True])
def test_one_token_attention_equals_torchs(dtype, heads, kv_heads, additive):
    draw = torch.Generator().manual_seed(heads)
    q = torch.randn(3, heads, 1, 16, generator=draw)
    k, v = torch.randn(2, 3, kv_heads, 40, 16, generator=draw)
    mask = torch.arange(40) <= torch.tensor([0, 20, 39])[:, None, None, None]
    if additive:
        mask = torch.zeros(()).masked_fill(~mask, torch.finfo(torch.float32).min)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    low = [t.to(dtype) if t.is_floating_point() else t for t in (q, k, v, mask)]
    ours = one_token_attention(*low, scale=0.3)
    assert ours.dtype == dtype
    assert ours.shape == truth.shape
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    assert (ours.float() - truth).abs().max() < limit
