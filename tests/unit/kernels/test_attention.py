"""`numadist::attention` against torch in f32, and where the compiler puts it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from numadist import models
from numadist._native import supported_isas
from numadist.errors import NativeError
from numadist.graph.passes import run_passes
from numadist.graph.query import aten
from numadist.kernels import attention
from numadist.kernels.attention import takes
from numadist.pipeline import passes
from numadist.pipeline.stages import capture

SIZES = {  # batch, heads, KV heads, queries, keys, head dim
    "one block": (1, 1, 1, 48, 64, 128),
    "grouped": (2, 6, 2, 100, 100, 64),
    "one KV head, widest": (1, 4, 1, 37, 37, 256),
    "more keys than queries": (1, 2, 2, 130, 300, 32),
    "one query": (2, 3, 3, 1, 65, 96),
    "one query, shared heads, several ranges": (2, 6, 2, 1, 700, 64),
    "one query, one KV head, widest": (1, 4, 1, 1, 300, 256),
    "many blocks": (1, 2, 1, 513, 513, 64),
}
MASKS = ["none", "causal", "window", "bf16", "f32"]
every_isa = pytest.mark.parametrize("isa", range(len(supported_isas())), ids=supported_isas())


def ours(q, k, v, mask, is_causal, isa=0):
    return attention.attention(q, k, v, mask, is_causal, q.shape[-1] ** -0.5, isa)


def mask_of(kind, heads, queries, keys):
    if kind == "window":  # whole blocks are hidden on both sides of the diagonal; every query sees a key
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
        return ((distance >= 0) & (distance < 70))[None, None]
    if kind in ("bf16", "f32"):
        return torch.randn(1, heads, queries, keys, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    return None


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every_isa
def test_errors_are_those_of_torch_in_the_same_dtype(isa, dtype, sizes, kind):
    batch, heads, kv_heads, queries, keys, dim = sizes
    assert takes(dim, dtype, None)
    torch.manual_seed(0)
    q = torch.randn(batch, queries, heads, dim).to(dtype).transpose(1, 2)  # as models have it
    k, v = (torch.randn(batch, kv_heads, keys, dim).to(dtype) for _ in range(2))
    mask, is_causal = mask_of(kind, heads, queries, keys), kind == "causal"

    def theirs(dtype):
        added = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        inputs = (x.to(dtype) for x in (q, k, v))
        return sdpa(*inputs, attn_mask=added, is_causal=is_causal, enable_gqa=True).double()

    truth = theirs(torch.float64)
    # Sums in another order: the worst of many numbers may be a bit worse.
    allowed = (2 if dtype == torch.float32 else 1.5) * (theirs(dtype) - truth).abs().max() + 1e-6
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        result = ours(q, k, v, mask, is_causal, isa)
        torch.set_num_threads(threads)
        assert (result.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_isa
def test_many_small_heads_are_packed_by_the_thread_that_reads_them(isa, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 70, 48).to(dtype) for heads in (8, 4, 4))
    result = ours(q, k, v, None, True, isa)
    truth = sdpa(*(x.double() for x in (q, k, v)), is_causal=True, enable_gqa=True)
    assert (result.double() - truth).abs().max() < (0.02 if dtype == torch.bfloat16 else 1e-5)
    # The same heads one at a time are too few for that.
    alone = [ours(q[b : b + 1], k[b : b + 1], v[b : b + 1], None, True, isa) for b in range(3)]
    assert torch.equal(result, torch.cat(alone))


@every_isa
def test_single_query_that_sees_no_key_gives_zeros(isa):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(*size).to(dtype) for size in [(2, 4, 1, 64), *[(2, 2, 300, 64)] * 2])
        seen = torch.zeros(2, 1, 1, 300, dtype=torch.bool)
        seen[1, ..., 290] = True
        result = ours(q, k, v, seen, False, isa)
        assert (result[0] == 0).all()
        torch.testing.assert_close(result[1, :, 0], v[1, :, 290].repeat_interleave(2, 0))
        k[1, 0, 290, 3] = float("nan")
        result = ours(q, k, v, seen, False, isa)
        assert result[1, :2].isnan().all(), "NaN is passed on"
        assert result[1, 2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_isa
def test_query_that_sees_no_key_gives_zeros(isa, dtype):
    q, k, v = (torch.randn(1, 2, 70, 64).to(dtype) for _ in range(3))
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool)
    mask[..., 3, :] = False
    result = ours(q, k, v, mask, False, isa)
    assert (result[:, :, 3] == 0).all()
    assert result.isfinite().all()
    assert (result[:, :, 4] != 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_isa
def test_nan_is_passed_on(isa, dtype):
    q, k, v = (torch.randn(1, 1, 150, 64).to(dtype) for _ in range(3))
    k[0, 0, 66, 5] = float("nan")
    result = ours(q, k, v, None, True, isa)
    assert result[0, 0, :66].isfinite().all()
    assert result[0, 0, 66:].isnan().all()


@every_isa
def test_a_query_of_its_own_mask_in_every_row_of_a_batch(isa):
    """As decoding calls it: rows of different lengths, over slots of which the last hold what must not count."""
    torch.manual_seed(1)
    q = torch.randn(3, 4, 1, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(3, 2, 640, 64, dtype=torch.bfloat16)[:, :, :576] for _ in range(2))
    lengths = torch.tensor([1, 300, 576])
    mask = (torch.arange(576) < lengths[:, None])[:, None, None]
    seen = ours(q, k, v, mask, False, isa)
    for row, length in enumerate(lengths.tolist()):
        alone = (x[row : row + 1] for x in (q, k[:, :, :length], v[:, :, :length]))
        wanted = sdpa(*(x.float() for x in alone), enable_gqa=True)
        assert (seen[row].float() - wanted[0]).abs().max() < 0.02
    none = ours(q, k, v, torch.zeros(3, 1, 1, 576, dtype=torch.bool), False, isa)
    assert (none == 0).all()


def test_a_mask_that_does_not_broadcast_is_an_error():
    q, k, v = (torch.randn(1, 2, 8, 64, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(NativeError, match=r"a mask of \[3, 8, 8\] does not broadcast to \[1, 2, 8, 8\]"):
        ours(q, k, v, torch.ones(3, 8, 8, dtype=torch.bool), False)


def test_refuses_what_it_does_not_take():
    q, k, v = (torch.randn(1, 2, 8, 40, dtype=torch.bfloat16) for _ in range(3))
    assert not takes(40, torch.bfloat16, None)
    assert not takes(64, torch.float64, None)
    assert not takes(64, torch.bfloat16, torch.float64)
    with pytest.raises(NativeError, match="8 queries of 2 heads of 40 over 2 KV heads: EINVAL"):
        ours(q, k, v, None, False)
    with pytest.raises(NativeError, match="not of one dtype we have"):
        ours(q, k.float(), v, None, False)
    with pytest.raises(NativeError, match="not of one dtype we have"):
        ours(q.double(), k.double(), v.double(), None, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_graph_takes_it_without_repeating_kv_heads(dtype):
    changes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = models.build("llama-tiny", dtype, **changes)
    inputs = models.prefill_inputs(model, 2, 70)
    gm = capture(model, inputs).gm
    with torch.no_grad():
        before = gm(**inputs).logits.float()
        run_passes(gm, passes.INFERENCE)
        after = gm(**inputs).logits.float()
    targets = [n.target for n in gm.graph.nodes]
    assert targets.count(torch.ops.numadist.attention.default) == 2, "layers"
    assert targets.count(aten.scaled_dot_product_attention.default) == 0
    for node in gm.graph.nodes:
        if node.target is torch.ops.numadist.attention.default:
            assert [n.meta["val"].shape[1] for n in node.args[:3]] == [4, 2, 2]  # heads
    assert (after - before).abs().max() <= 0.03 * before.abs().max()
