"""Linear layers of few rows in f32, by every ISA, against f64 and against oneDNN on the same packed weights."""

import pytest
import torch

from numadist import _native
from numadist.errors import NativeError
from numadist.kernels import skinny
from numadist.kernels.skinny import MAX_ROWS
from numadist.lowering.packing import use_skinny_linears

packs_f32 = torch.backends.mkldnn.is_available()
_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


def panels(w_NK, width):
    """Weights in the layout the kernel reads, [ceil(N / width), K, width], made without oneDNN."""
    num_out, num_in = w_NK.shape
    padded = torch.zeros(-(-num_out // width) * width, num_in)
    padded[:num_out] = w_NK
    return padded.view(-1, width, num_in).transpose(1, 2).contiguous()


def run(isa, x_MK, blob, bias, num_out, width):
    y_MN = torch.full((x_MK.shape[0], num_out), torch.nan)
    pointers = x_MK.data_ptr(), blob.data_ptr(), None if bias is None else bias.data_ptr(), y_MN.data_ptr()
    code = _native.lib.nd_skinny_linear_f32(isa, *pointers, x_MK.shape[0], num_out, x_MK.shape[1], width)
    assert code == 0, f"code {code}"
    return y_MN


def error_bound(x_MK, w_NK):
    """Of K products summed in f32 one after the other: their roundings are random, and their sums grow with sqrt(K)."""
    spread = (x_MK.double() ** 2 @ (w_NK.double() ** 2).t()).sqrt()
    return 2 * torch.finfo(torch.float32).eps * x_MK.shape[1] ** 0.5 * spread + 1e-6


@pytest.mark.parametrize("isa", range(len(_native.supported_isas())), ids=_native.supported_isas())
@pytest.mark.parametrize("width", skinny.WIDTHS[torch.float32])
def test_every_isa_gives_the_product_for_every_width_of_panels(isa, width):
    torch.manual_seed(isa)
    for num_out, num_in in [(64, 1), (50, 66), (257, 130)]:
        w_NK, bias = torch.randn(num_out, num_in), torch.randn(num_out)
        for num_rows in range(1, MAX_ROWS + 1):
            x_MK = torch.randn(num_rows, num_in)
            b = bias if num_rows % 2 else None
            wanted = x_MK.double() @ w_NK.double().t() + (0 if b is None else b.double())
            seen = run(isa, x_MK, panels(w_NK, width), b, num_out, width)
            worst = ((seen - wanted).abs() / error_bound(x_MK, w_NK)).max()
            what = f"{num_rows} rows of {num_in}, {num_out} outputs, bias {b is not None}"
            assert worst <= 1, f"{what}: {worst:.1f} times the error allowed"


def packed(w_NK):
    return torch.ops.mkldnn._reorder_linear_weight(w_NK, 128)


@pytest.mark.skipif(not packs_f32, reason="needs a torch with oneDNN")
@pytest.mark.parametrize("num_out", [16, 48, 96, 128, 200, 257])
def test_packed_layers_are_taken_with_the_width_that_onednn_chose(num_out):
    torch.manual_seed(0)
    w_NK, bias = torch.randn(num_out, 64), torch.randn(num_out)
    width = skinny.panel_width(packed(w_NK))
    if width is None:
        assert "avx2" not in _native.supported_isas(), "oneDNN packs plain panels from AVX2 on"
        return
    for num_rows in (1, 16, 17):
        x = torch.randn(2, num_rows, 64)[:1]
        seen = torch.ops.numadist.skinny_linear(x, packed(w_NK), bias, num_out, width)
        wanted = torch.nn.functional.linear(x.double(), w_NK.double(), bias.double())
        assert ((seen - wanted).abs()[0] <= error_bound(x[0], w_NK)).all()


@pytest.mark.skipif(not packs_f32, reason="needs a torch with oneDNN")
def test_weights_of_another_dtype_or_layout_are_not_taken():
    torch.manual_seed(0)
    w_NK = torch.randn(128, 64)
    # The same number of bytes in rows: only trying tells.
    assert skinny.panel_width(w_NK.to_mkldnn()) is None
    assert skinny.panel_width(w_NK.half().to_mkldnn()) is None


def test_a_row_has_the_same_bits_alone_and_among_others_on_every_isa_that_fuses_products():
    torch.manual_seed(0)
    w_NK, x_MK = torch.randn(128, 300), torch.randn(MAX_ROWS, 300)
    fused = [i for i, name in enumerate(_native.supported_isas()) if name != "portable"]
    for isa in fused or [0]:
        together = run(isa, x_MK, panels(w_NK, 64), None, 128, 64)
        for row in range(MAX_ROWS):
            assert torch.equal(
                run(isa, x_MK[row : row + 1], panels(w_NK, 64), None, 128, 64)[0], together[row]
            )
        if isa != 0:
            assert torch.equal(run(0, x_MK, panels(w_NK, 64), None, 128, 64), together)


@pytest.mark.skipif(not packs_f32, reason="needs a torch with oneDNN")
def test_sums_are_no_less_exact_than_those_of_onednn():
    torch.manual_seed(0)
    w_NK = torch.randn(256, 2048)
    x_MK = torch.randn(8, 2048)
    wanted = x_MK.double() @ w_NK.double().t()
    theirs = (_linear_pointwise(x_MK, packed(w_NK), None, "none", [], "") - wanted).square().mean()
    for isa in range(len(_native.supported_isas())):
        ours = (run(isa, x_MK, panels(w_NK, 64), None, 256, 64) - wanted).square().mean()
        assert ours <= theirs, f"{_native.supported_isas()[isa]}: {ours:.1e}, oneDNN {theirs:.1e}"


def test_a_graph_uses_the_kernel_where_it_fits_and_gives_the_same():
    if not packs_f32:
        return
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.register_buffer("packed", packed(torch.randn(128, 64)), persistent=False)
    graph = torch.fx.Graph()
    x, blob = graph.placeholder("x"), graph.get_attr("packed")
    graph.output(graph.call_function(_linear_pointwise, (x, blob, None, "none", [], "")))
    gm = torch.fx.GraphModule(module, graph)
    rows = torch.randn(4, 64)
    wanted = gm(rows)
    use_skinny_linears(gm)
    gm.recompile()
    own = [n for n in gm.graph.nodes if n.target is torch.ops.numadist.skinny_linear.default]
    assert len(own) == (skinny.panel_width(module.packed) is not None)
    torch.testing.assert_close(gm(rows), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not packs_f32, reason="needs a torch with oneDNN")
def test_errors_say_what_was_asked():
    with pytest.raises(NativeError, match=r"layer of \[17, 8\] and 64 outputs in panels of 64: EINVAL"):
        skinny.skinny_linear(torch.zeros(17, 8), packed(torch.zeros(64, 8)), None, 64, 64)
    with pytest.raises(
        NativeError, match=r"in torch.float16: there are kernels in torch.bfloat16, torch.float32"
    ):
        skinny.skinny_linear(torch.zeros(1, 8), torch.zeros(64, 8).half().to_mkldnn(), None, 64, 64)
