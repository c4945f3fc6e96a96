"""`numadist::int8_linear`: a linear layer of few rows on int8 weights with a scale per output, activations in bf16.

What torchao and vLLM call int8 weight-only. Each weight is scale[n] * q, q from -127 to 127; it is widened to bf16,
which holds q exactly, in registers: a step reads half the bytes, and nothing else loses precision.

Shapes: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from numadist._native import lib
from numadist._native_kernels import int8_linear_runs
from numadist._native_replay import call, contiguous, kept

PANEL = 64  # ND_INT8_PANEL
_LARGEST = 127

_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define("int8_linear(Tensor x, Tensor blob, Tensor scale, Tensor? bias) -> Tensor")


def takes(in_features: int, dtype: torch.dtype) -> bool:
    """Whether this CPU has the fast kernel and it computes such a layer."""
    return int8_linear_runs() and dtype == torch.bfloat16 and in_features % 2 == 0


def quantize(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 values [N, K], f32 scales [N]): symmetric, the largest magnitude of an output becomes 127."""
    w_NK = w_NK.float()
    scale_N = w_NK.abs().amax(1) / _LARGEST
    scale_N = scale_N.masked_fill(scale_N == 0, 1.0)
    return (w_NK / scale_N[:, None]).round().to(torch.int8), scale_N


def pack(q_NK: Tensor) -> Tensor:
    """int8 values as the kernel reads them: uint8 [panels, K / 2, 128], in the order csrc/nd_core.h tells."""
    num_out, num_in = q_NK.shape
    padded = q_NK.new_zeros(-(-num_out // PANEL) * PANEL, num_in)
    padded[:num_out] = q_NK
    signed = padded.abs().to(torch.uint8) | (padded < 0).to(torch.uint8) << 7
    # 64 columns are 2 registers of 2 halves of 4 lanes of 4.
    split = signed.view(-1, 2, 2, 4, 4, num_in // 2, 2)
    return split.permute(0, 5, 1, 3, 2, 4, 6).reshape(-1, num_in // 2, 2 * PANEL).contiguous()


@torch.library.impl(_LIBRARY, "int8_linear", "CPU")
def int8_linear(x: Tensor, blob: Tensor, scale: Tensor, bias: Tensor | None, fast: bool = True) -> Tensor:
    """x (scale W)^T + bias in bf16, [..., K] -> [..., N]. fast=False: by plain loops, on any CPU.

    Raises: NativeError where `takes` refuses.
    """
    x = contiguous(x)
    in_features, out_features = x.shape[-1], scale.shape[0]
    y = kept(x.new_empty((*x.shape[:-1], out_features)))
    call(
        lib.nd_int8_linear,
        fast,
        x.data_ptr(),
        blob.data_ptr(),
        scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // in_features,
        out_features,
        in_features,
        what=lambda: f"int8 linear layer of {list(x.shape)} and {out_features} outputs",
    )
    return y


@torch.library.register_fake("numadist::int8_linear", lib=_LIBRARY)
def _int8_linear_fake(x: Tensor, blob: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]))
