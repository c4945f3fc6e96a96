"""Layers and lookups on codes by every ISA against exact arithmetic, parts of them, and rounding while loading."""

from dataclasses import replace

import pytest
import torch

from numadist import _native
from numadist.errors import NativeError
from numadist.kernels import quantized
from numadist.kernels.quantized import GROUP, Quantized, Scales, pack, quantize

every_isa = pytest.mark.parametrize("isa", range(len(_native.supported_isas())), ids=_native.supported_isas())
LAYOUTS = [
    (4, Scales.F16, 0),
    (4, Scales.F16_MIN, 0),
    (4, Scales.U8_MIN, 3),
    (5, Scales.F16, 0),
    (5, Scales.F16_MIN, 0),
    (5, Scales.U8_MIN, 3),
    (8, Scales.F16, 0),
    (8, Scales.I8_HALF, 3),
]
every_layout = pytest.mark.parametrize(("bits", "kind", "shared"), LAYOUTS)


def draw(bits: int, kind: Scales, shared: int, num_out: int, num_in: int) -> Quantized:
    torch.manual_seed(bits + kind)
    groups = -(-num_in // GROUP)
    shares = -(-groups // (1 << shared))
    codes = torch.randint(1 << bits, (num_out, groups, GROUP)).to(torch.uint8)
    scale = torch.randn(num_out, shares, 2 if kind.has_minimum else 1).half() / 16
    factors = None
    if kind is Scales.I8_HALF:
        factors = torch.randint(-128, 128, (num_out, groups, 2)).to(torch.int8)
    if kind is Scales.U8_MIN:
        factors = torch.randint(64, (num_out, groups, 2)).to(torch.uint8)
    return Quantized(codes, scale, factors, bits, kind, num_in, shared)


def layer(x, q, bias=None, isa=0):
    p = pack(q)
    layout = p.out_features, p.in_features, int(p.kind), p.shared
    return quantized.quantized_linear(x, p.codes, p.scales, p.order, bias, *layout, isa=isa)


def table(ids, q, dtype=torch.float32):
    p = pack(q)
    layout = p.out_features, p.in_features, int(p.kind), p.shared
    return quantized.quantized_embedding(ids, p.codes, p.scales, p.order, *layout, dtype)


def rounded(x_MK):
    """x as the kernel multiplies it: 8 bits a number, by groups of 32."""
    groups = torch.nn.functional.pad(x_MK.float(), (0, -x_MK.shape[1] % GROUP)).view(len(x_MK), -1, GROUP)
    largest = groups.abs().amax(2, keepdim=True)
    codes = (groups * (torch.tensor(127.0) / largest).nan_to_num(posinf=0)).round()
    return (codes.double() * (largest / 127).double()).flatten(1)[:, : x_MK.shape[1]]


@every_isa
@every_layout
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (33, 67), (50, 256), (16, 577)])
def test_products_are_those_of_exact_arithmetic_for_all_rows(isa, bits, kind, shared, num_out, num_in):
    q = draw(bits, kind, shared, num_out, num_in)
    w_NK, bias = q.widened().double(), torch.randn(num_out)
    x_MK = torch.randn(33, num_in)
    exact = rounded(x_MK) @ w_NK.t() + bias
    whole = layer(x_MK, q, bias, isa)
    terms = rounded(x_MK).abs() @ w_NK.abs().t() + bias.abs()
    assert ((whole.double() - exact).abs() <= 1e-5 * terms + 1e-30).all()
    for num_rows in range(1, 33):
        assert torch.equal(layer(x_MK[:num_rows], q, bias, isa), whole[:num_rows]), f"{num_rows} rows"


@every_layout
def test_all_isas_round_rows_alike(bits, kind, shared):
    q = draw(bits, kind, shared, 40, 300)
    x_MK = torch.randn(5, 300)
    first, *others = [layer(x_MK, q, isa=isa) for isa in range(len(_native.supported_isas()))]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_isa
def test_rows_of_16_bits_give_the_same_numbers_rounded_once(isa, dtype):
    q = draw(4, Scales.F16_MIN, 0, 50, 200)
    x_MK, bias = torch.randn(3, 200).to(dtype), torch.randn(50).to(dtype)
    wide = layer(x_MK.float(), q, bias.float(), isa)
    assert torch.equal(layer(x_MK, q, bias, isa), wide.to(dtype))
    assert torch.equal(
        table(torch.tensor([[3, 49]]), q, dtype), q.widened()[torch.tensor([[3, 49]])].to(dtype)
    )


@every_layout
def test_parts_are_those_of_the_whole_for_any_cut(bits, kind, shared):
    q = draw(bits, kind, shared, 20, 600)
    w_NK = q.widened()
    chosen = torch.tensor([19, 0, 7])
    for ranges in [[(0, 600)], [(0, 256)], [(256, 600)], [(320, 576)], [(5, 40), (100, 101), (430, 600)]]:
        part = q.outputs(chosen).inputs(ranges)
        wanted = torch.cat([w_NK[chosen, start:stop] for start, stop in ranges], 1)
        assert torch.equal(part.widened(), wanted), ranges
        assert torch.equal(table(torch.arange(3), part), wanted), ranges
        x_MK = torch.randn(2, wanted.shape[1])
        scale = wanted.abs().sum(1).max() * x_MK.abs().max()
        assert (layer(x_MK, part) - x_MK @ wanted.t()).abs().max() < 0.01 * scale
        again = part.inputs([(1, wanted.shape[1])])
        assert torch.equal(again.widened(), wanted[:, 1:]), f"{ranges}, cut again"


def test_cuts_at_blocks_keep_the_scales_they_share_and_no_order():
    q = draw(4, Scales.U8_MIN, 3, 4, 1024)
    assert [q.inputs([cut]).shared for cut in [(0, 512), (256, 1024), (128, 512), (32, 64)]] == [3, 3, 2, 3]
    assert q.inputs([(256, 512)]).order is None
    assert q.inputs([(250, 512)]).order is not None


def test_rows_that_are_not_finite_give_no_numbers_and_tiny_ones_zero():
    q = draw(4, Scales.F16, 0, 20, 64)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x_MK = torch.randn(3, 64)
        x_MK[1, 40] = bad
        seen = layer(x_MK, q)
        assert seen[1].isnan().all()
        assert seen[[0, 2]].isfinite().all()
    assert torch.equal(layer(torch.full((1, 64), 1e-38), q), torch.zeros(1, 20))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.008), (4, 0.1)])
def test_weights_are_rounded_to_the_nearest_code(bits, most):
    torch.manual_seed(0)
    w_NK = torch.randn(40, 100) * torch.logspace(-3, 2, 40)[:, None]
    w_NK[3] = 0
    w_NK[4] = 7.5
    q = quantize(w_NK, bits)
    error = (q.widened() - w_NK).norm(dim=1)
    assert (error[5:] <= most * w_NK.norm(dim=1)[5:] + 1e-6).all()
    assert error[3] == 0
    assert error[4] < 0.004 * w_NK[4].norm()


@every_isa
@every_layout
def test_each_row_meets_its_expert_alone(isa, bits, kind, shared):
    experts = [draw(bits, kind, shared, 21, 577) for _ in range(4)]
    for number, expert in enumerate(experts):
        expert.codes[:] = expert.codes.roll(number, 0)
    joined = replace(
        experts[0],
        codes=torch.cat([e.codes for e in experts]),
        scale=torch.cat([e.scale for e in experts]),
        factors=None if experts[0].factors is None else torch.cat([e.factors for e in experts]),
    )
    p = pack(joined, len(experts))
    layout = p.out_features, p.in_features, int(p.kind), p.shared
    for ends in ([0, 1, 1, 2], [5, 5, 6, 40], [0, 0, 0, 0], [0, 0, 3, 3]):
        x_MK = torch.randn(ends[-1], 577)
        seen = quantized.quantized_experts(
            x_MK, torch.tensor(ends, dtype=torch.int32), p.codes, p.scales, p.order, *layout, isa=isa
        )
        assert seen.shape == (ends[-1], 21)
        for expert, start, end in zip(experts, [0, *ends], ends, strict=False):
            if end > start:
                assert torch.equal(seen[start:end], layer(x_MK[start:end], expert, isa=isa)), ends


def test_what_has_no_codes_is_refused():
    for largest in (torch.inf, torch.nan, 1e6, 1e-5):
        with pytest.raises(ValueError, match="do not fit weights of which the largest is"):
            quantize(torch.tensor([[1e-6, largest]]), 8)
    with pytest.raises(ValueError, match="4 or 8 bits, not 3"):
        quantize(torch.ones(1, 32), 3)
    q = draw(8, Scales.F16, 0, 4, 32)
    with pytest.raises(NativeError, match=r"quantized linear layer of \[1, 32\] torch.float64"):
        layer(torch.ones(1, 32, dtype=torch.float64), q)
    p = pack(q)
    for ends in ([-1, 2], [2, 1], [1, 3], [1, 1]):
        with pytest.raises(NativeError, match=r"2 quantized experts of \[2, 32\] torch.float32"):
            quantized.quantized_experts(
                torch.ones(2, 32), torch.tensor(ends), p.codes, p.scales, None, 4, 32, int(p.kind), 0
            )
    for token in (-1, 4):
        with pytest.raises(NativeError, match="lookup of 1 rows in a quantized table of 4"):
            table(torch.tensor([token]), q)


def test_the_compiler_knows_the_shapes():
    with torch._subclasses.FakeTensorMode():
        x, codes = torch.empty(2, 3, 64), torch.empty(1, 2, 256, dtype=torch.uint8)
        args = codes, torch.empty(1, 64, dtype=torch.uint8), None
        assert torch.ops.numadist.quantized_linear(x, *args, None, 5, 64, 0, 0).shape == (2, 3, 5)
        ends = torch.zeros(4, dtype=torch.int32)
        assert torch.ops.numadist.quantized_experts(x[0], ends, *args, 5, 64, 0, 0).shape == (3, 5)
        rows = torch.ops.numadist.quantized_embedding(
            torch.zeros(2, 3, dtype=torch.int64), *args, 5, 64, 0, 0, torch.bfloat16
        )
    assert rows.shape == (2, 3, 64)
    assert rows.dtype == torch.bfloat16
