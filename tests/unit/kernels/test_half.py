"""Linear layers on weights of 16 bits by every ISA against f64 and torch's own, and where the compiler puts them."""

import pytest
import torch

from numadist import _native, models
from numadist.errors import NativeError
from numadist.graph.passes import run_passes
from numadist.kernels import half
from numadist.lowering.packing import has_halves
from numadist.pipeline import passes
from numadist.pipeline.stages import capture

DTYPES = [torch.bfloat16, torch.float16]
# Whole panels and not, whole blocks of 64 and of 128 inputs and not, odd numbers.
SHAPES = [(1, 1), (50, 67), (257, 130), (192, 577)]
MANY_ROWS = [17, 40, 193]
every_isa = pytest.mark.parametrize("isa", range(len(_native.supported_isas())), ids=_native.supported_isas())
needs_f16 = pytest.mark.skipif(
    not half.pays(torch.float16), reason="needs a CPU on which oneDNN has no products in float16"
)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_errors_are_at_most_those_of_torch_for_all_rows_and_widths(isa, dtype, num_out, num_in):
    torch.manual_seed(isa)
    w_NK, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    for num_rows in [*range(1, 17), *MANY_ROWS]:
        x_MK = torch.randn(num_rows, num_in).to(dtype)
        b = bias if num_rows % 2 else None
        exact = torch.nn.functional.linear(x_MK.double(), w_NK.double(), None if b is None else b.double())
        once = (exact.to(dtype).double() - exact).abs().max()  # what rounding alone costs
        theirs = (torch.nn.functional.linear(x_MK, w_NK, b).double() - exact).abs().max()
        for width in half.WIDTHS:
            seen = half.half_linear(x_MK, half.pack(w_NK, width), b, num_out, isa)
            ours = (seen.double() - exact).abs().max()
            # Sums in f32 may fall on the other side of a tie than exact ones.
            assert ours <= max(theirs, once * (1 + 1e-3) + 1e-5), f"{num_rows} rows, width {width}"


@every_isa
@pytest.mark.parametrize("num_rows", [1, 7, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_16_bits_is_read_and_written_as_it_is(isa, dtype, num_rows):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    ones = torch.ones(num_rows, 1, dtype=dtype)
    seen = half.half_linear(ones, half.pack(every), None, len(every), isa)
    same = (seen == every.t()) | (seen.isnan() & every.t().isnan())
    assert same.all(), f"{seen[~same][:5]} for {every.t().expand_as(seen)[~same][:5]}"
    seen = half.half_linear(every, half.pack(ones[:1]), None, 1, isa)
    assert ((seen == every) | (seen.isnan() & every.isnan())).all()


@every_isa
def test_results_are_rounded_to_the_nearest_and_to_even(isa):
    # 1 + d, rounded where d is half a step, a bit more, a bit less; and what no float16 holds.
    for dtype, step in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
        w = torch.tensor([[1.0, step / 2], [1.0 + step, step / 2], [1.0, step / 2 * 1.125], [1.0, 0.875]])
        x = torch.tensor([[1.0, 1.0]])
        seen = half.half_linear(x.to(dtype), half.pack(w.to(dtype)), None, 4, isa)
        assert seen.tolist() == [[1.0, 1.0 + 2 * step, 1.0 + step, 1.875]]
    big, tiny = torch.tensor([[60000.0], [-60000.0]]).half(), torch.tensor([[2.0**-14]]).half()
    assert half.half_linear(torch.tensor([[2.0]]).half(), half.pack(big), None, 2, isa).tolist() == [
        [torch.inf, -torch.inf]
    ]
    for factor in (0.5, 2.0**-10, 2.0**-10 * 1.5, 2.0**-11, 2.0**-11 * 1.5, 0.3):
        x = torch.tensor([[factor]]).half()
        assert torch.equal(half.half_linear(x, half.pack(tiny), None, 1, isa), x * tiny)


def test_panels_are_narrow_where_wide_ones_leave_threads_without_work():
    assert half.panel_width(4096, 2) == 64
    assert half.panel_width(192, 2) == 32  # 3 panels of 64 are 2 and 1
    assert half.panel_width(100, 16) == 16
    assert half.pack(torch.zeros(100, 3).half(), 16).shape == (7, 3, 16)


def test_other_dtypes_are_refused():
    x = torch.zeros(1, 8)
    with pytest.raises(NativeError, match=r"linear layer of \[1, 8\] torch.float32"):
        half.half_linear(x, half.pack(torch.zeros(4, 8)), None, 4)
    with pytest.raises(NativeError, match=r"EINVAL"):
        half.half_linear(x.half(), half.pack(torch.zeros(4, 8).bfloat16()), None, 4)


def test_shapes_are_known_without_running():
    x, panels = torch.empty(2, 3, 8, device="meta"), torch.empty(1, 8, 16, device="meta")
    assert torch.ops.numadist.half_linear(x, panels, None, 5).shape == (2, 3, 5)


@needs_f16
@pytest.mark.parametrize("stage", ["INFERENCE", "PACKED"])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_a_graph_holds_its_weights_once_and_gives_the_same(name, stage):
    model = models.build(name, torch.float16)
    inputs = models.prefill_inputs(model, 2, 20)
    gm = capture(model, inputs).gm
    with torch.no_grad():
        before = gm(**inputs).logits.float()
        run_passes(gm, getattr(passes, stage))
        after = gm(**inputs).logits.float()
    assert has_halves(gm)
    # Only vectors are left plain, and tables that rows are looked up in.
    read = {str(n.args[0].target) for n in gm.graph.nodes if n.target is torch.ops.aten.embedding.default}
    assert {p for p, t in gm.named_parameters() if t.dim() > 1} <= read
    assert (after - before).abs().max() <= 0.01 * before.abs().max()
