"""Linear layers of few rows, by every ISA, against f32 and against oneDNN on the same packed weights."""

import pytest
import torch

from numadist import _native
from numadist.errors import NativeError
from numadist.kernels import skinny
from numadist.lowering.packing import use_skinny_linears

# Whole panels and not, more panels than threads and fewer; whole blocks of 32 inputs and not.
SHAPES = [(64, 2), (50, 66), (257, 130), (640, 192)]
packs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="needs a CPU on which oneDNN packs weights in bf16",
)


def panels(w_NK, width):
    """Weights in the layout the kernel reads, [ceil(N / width), K / 2, width, 2], made without oneDNN."""
    num_out, num_in = w_NK.shape
    padded = torch.zeros(-(-num_out // width) * width, num_in, dtype=w_NK.dtype)
    padded[:num_out] = w_NK
    return padded.view(-1, width, num_in // 2, 2).transpose(1, 2).contiguous()


def run(isa, x_MK, blob, bias, num_out, width):
    y_MN = torch.full((x_MK.shape[0], num_out), torch.nan, dtype=torch.bfloat16)
    pointers = x_MK.data_ptr(), blob.data_ptr(), None if bias is None else bias.data_ptr(), y_MN.data_ptr()
    code = _native.lib.nd_skinny_linear(isa, *pointers, x_MK.shape[0], num_out, x_MK.shape[1], width)
    assert code == 0, f"code {code}"
    return y_MN


@pytest.mark.parametrize("isa", range(len(_native.supported_isas())), ids=_native.supported_isas())
@pytest.mark.parametrize("width", skinny.WIDTHS[torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_isa_gives_the_f32_product_rounded_once(isa, width, num_threads):
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    torch.manual_seed(isa)
    try:
        for num_out, num_in in SHAPES:
            w_NK = torch.randn(num_out, num_in).bfloat16()
            bias = torch.randn(num_out).bfloat16()
            for num_rows in range(1, skinny.MAX_ROWS + 1):
                x_MK = torch.randn(num_rows, num_in).bfloat16()
                for b in (None, bias):
                    wanted = x_MK.float() @ w_NK.float().t() + (0 if b is None else b.float())
                    seen = run(isa, x_MK, panels(w_NK, width), b, num_out, width)
                    what = f"{num_rows} rows of {num_in}, {num_out} outputs, bias {b is not None}: "
                    # Half a step of bf16, and f32 sums in another order.
                    torch.testing.assert_close(
                        seen.float(),
                        wanted,
                        rtol=4.1e-3,
                        atol=1e-4 * num_in**0.5,
                        msg=lambda t, w=what: w + t,
                    )
    finally:
        torch.set_num_threads(threads)


def test_too_many_rows_odd_inputs_and_other_widths_are_refused():
    x = torch.zeros(17, 64, dtype=torch.bfloat16)
    call = _native.lib.nd_skinny_linear
    assert call(0, x.data_ptr(), x.data_ptr(), None, x.data_ptr(), 17, 64, 64, 64) < 0
    assert call(0, x.data_ptr(), x.data_ptr(), None, x.data_ptr(), 1, 64, 63, 64) < 0
    assert call(0, x.data_ptr(), x.data_ptr(), None, x.data_ptr(), 1, 64, 64, 16) < 0
    assert call(99, x.data_ptr(), x.data_ptr(), None, x.data_ptr(), 1, 64, 64, 64) < 0


def test_shapes_are_known_without_running():
    x, blob = torch.empty(2, 3, 8, device="meta"), torch.empty(5, 8, device="meta")
    assert torch.ops.numadist.skinny_linear(x, blob, None, 5, 32).shape == (2, 3, 5)


def test_weights_that_are_not_packed_are_an_error():
    with pytest.raises(NativeError, match="reads packed weights"):
        torch.ops.numadist.skinny_linear(torch.zeros(1, 8), torch.zeros(4, 8), None, 4, 64)


def packed(w_NK):
    return torch.ops.mkldnn._reorder_linear_weight(w_NK, 128)


@packs_bf16
def test_a_layer_is_taken_only_if_its_packed_weights_have_the_layout():
    torch.manual_seed(0)
    w_NK = torch.randn(128, 64).bfloat16()
    # The same number of bytes in rows: only trying tells.
    assert skinny.panel_width(w_NK.to_mkldnn()) is None, "not packed"
    if (width := skinny.panel_width(packed(w_NK))) is not None:
        assert _native.supported_isas()[0] in skinny.FAST_ISAS
        for num_rows in (1, 16, 17):
            x = torch.randn(2, num_rows, 64).bfloat16()[:1]
            seen = torch.ops.numadist.skinny_linear(x, packed(w_NK), None, 128, width)
            wanted = torch.nn.functional.linear(x.float(), w_NK.float())
            torch.testing.assert_close(seen.float(), wanted, rtol=4.1e-3, atol=1e-3)


@packs_bf16
def test_of_two_widths_with_as_many_bytes_the_one_that_onednn_packed_is_found(monkeypatch):
    torch.manual_seed(0)
    blob = packed(torch.randn(128, 64).bfloat16())
    width = skinny.panel_width(blob)
    monkeypatch.setitem(skinny.WIDTHS, torch.bfloat16, skinny.WIDTHS[torch.bfloat16][::-1])
    assert skinny.panel_width(blob) == width


@packs_bf16
def test_a_graph_uses_the_kernel_where_it_fits_and_gives_the_same():
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.register_buffer("packed", packed(torch.randn(128, 64).bfloat16()), persistent=False)
    graph = torch.fx.Graph()
    x, blob = graph.placeholder("x"), graph.get_attr("packed")
    op = torch.ops.mkldnn._linear_pointwise.default
    graph.output(graph.call_function(op, (x, blob, None, "none", [], "")))
    gm = torch.fx.GraphModule(module, graph)
    rows = torch.randn(4, 64).bfloat16()
    wanted = gm(rows)
    use_skinny_linears(gm)
    gm.recompile()
    own = [n for n in gm.graph.nodes if n.target is torch.ops.numadist.skinny_linear.default]
    assert len(own) == (skinny.panel_width(module.packed) is not None)
    torch.testing.assert_close(gm(rows).float(), wanted.float(), rtol=8e-3, atol=1e-3)
