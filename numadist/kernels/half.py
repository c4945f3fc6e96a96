"""`numadist::half_linear`: a linear layer on weights of 16 bits, where torch and oneDNN have no fast one.

Without AVX512-BF16 a CPU has no products of bf16, and of float16 hardly any has. Weights lie in memory in 16 bits, in
panels of ours, one copy for reading prompts and for decoding; they are widened to f32 on the way, in registers for few
rows and in pieces that the cache holds for many (csrc/kernels/panels-inl.h).

Shapes: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from numadist._native import Dtype, supported_isas
from numadist._native_kernels import lib
from numadist._native_replay import call, contiguous, kept
from numadist.kernels.skinny import FAST_ISAS

WIDTHS = (64, 32, 16)
_CODES = {torch.bfloat16: int(Dtype.BF16), torch.float16: int(Dtype.F16)}

_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define("half_linear(Tensor x, Tensor panels, Tensor? bias, int out_features) -> Tensor")


def pays(dtype: torch.dtype) -> bool:
    """Whether the kernel is the fastest that this CPU has for layers in the dtype."""
    if dtype == torch.bfloat16:
        return supported_isas()[0] not in FAST_ISAS or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def kernel_name(dtype: torch.dtype) -> str:
    """What multiplies by weights of the dtype in compiled models, for people to read."""
    name = str(dtype).removeprefix("torch.")
    if pays(dtype):
        return f"{name} weights widened to f32 by our {supported_isas()[0]} kernels"
    return f"{name} weights packed by oneDNN"


def panel_width(out_features: int, num_threads: int) -> int:
    """Columns of a panel: many, unless some threads of a team would then have much less to do than others."""

    def largest_share(width: int) -> int:
        num_panels = -(-out_features // width)
        return -(-num_panels // num_threads) * width

    return next(w for w in WIDTHS if largest_share(w) <= 1.05 * largest_share(WIDTHS[-1]))


def pack(w_NK: Tensor, width: int | None = None) -> Tensor:
    """Weights as the kernel reads them: [ceil(N / width), K, width]; what is past N is zero."""
    num_out, num_in = w_NK.shape
    width = width or panel_width(num_out, torch.get_num_threads())
    panels = w_NK.new_zeros(-(-num_out // width), num_in, width)
    whole = num_out // width
    panels[:whole] = w_NK[: whole * width].view(whole, width, num_in).transpose(1, 2)
    if whole < len(panels):
        panels[whole, :, : num_out - whole * width] = w_NK[whole * width :].t()
    return panels


@torch.library.impl(_LIBRARY, "half_linear", "CPU")
def half_linear(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, isa: int = 0) -> Tensor:
    """x W^T + bias, [..., K] -> [..., N], all of one dtype. isa: of supported_isas().

    Raises: NativeError for dtypes other than bfloat16 and float16.
    """
    x = contiguous(x)
    in_features = x.shape[-1]
    num_rows = x.numel() // in_features
    y = kept(x.new_empty((*x.shape[:-1], out_features)))
    scratch = kept(x.new_empty(lib.nd_half_linear_scratch(num_rows, in_features), dtype=torch.uint8))
    call(
        lib.nd_half_linear,
        isa,
        _CODES.get(panels.dtype, -1) if panels.dtype == x.dtype else -1,
        x.data_ptr(),
        panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        scratch.data_ptr(),
        num_rows,
        out_features,
        in_features,
        panels.shape[2],
        what=lambda: f"linear layer of {list(x.shape)} {x.dtype} on {list(panels.shape)} {panels.dtype}",
    )
    return y


@torch.library.register_fake("numadist::half_linear", lib=_LIBRARY)
def _half_linear_fake(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))
