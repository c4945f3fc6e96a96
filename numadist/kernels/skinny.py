"""`numadist::skinny_linear`: a linear layer of few rows on weights as oneDNN packs them, by AMX or AVX512-BF16.

The weights are those that `_linear_pointwise` reads, so a model has them once for both phases. Their layout is no
stable interface: `panel_width` tries the very weights against oneDNN, and a layer that differs stays with oneDNN.

Shapes: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from numadist._native import lib, supported_isas
from numadist._native_replay import call, contiguous, kept
from numadist.errors import NativeError

MAX_ROWS = 16  # ND_SKINNY_ROWS
# Columns side by side in packed weights: of machines with AVX512-BF16, and with AMX.
WIDTHS = (64, 32)
# The ISAs whose kernels are faster than oneDNN's, see docs/phases.md; the others are their references.
FAST_ISAS = ("amx_bf16", "avx512_bf16")
# Both round to bf16 once, after sums in f32 of another order.
TOLERANCE = 1e-2

_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define("skinny_linear(Tensor x, Tensor blob, Tensor? bias, int out_features, int width) -> Tensor")


def panel_width(blob: Tensor) -> int | None:
    """Columns of a panel of packed weights, [N, K]; None if the layout is another, or the CPU has no fast kernel.

    Cost: one pass over the weights with two rows, by either; two if there are two possibilities.
    """
    out_features, in_features = blob.shape
    if blob.dtype != torch.bfloat16 or in_features % 2 or supported_isas()[0] not in FAST_ISAS:
        return None
    num_bytes = torch.ops.mkldnn._nbytes(blob)
    possible = [width for width in WIDTHS if num_bytes == 2 * in_features * -(-out_features // width) * width]
    if not possible:
        return None
    x_MK = torch.randn(2, in_features, generator=torch.Generator().manual_seed(1)).to(blob.dtype)
    wanted = _linear_pointwise(x_MK, blob, None, "none", [], "").float()
    for width in possible:
        seen = skinny_linear(x_MK, blob, None, out_features, width).float()
        if (seen - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
            return width
    return None


def skinny_linear(x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int) -> Tensor:
    """x W^T + bias, [..., K] -> [..., N], on weights in panels of 32 or 64. Raises: NativeError above 16 rows."""
    x = contiguous(x)
    in_features = x.shape[-1]
    y = kept(x.new_empty((*x.shape[:-1], out_features)))
    call(
        lib.nd_skinny_linear,
        0,  # this CPU's best
        x.data_ptr(),
        torch.ops.mkldnn.data_ptr.default(blob),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // in_features,
        out_features,
        in_features,
        width,
        what=lambda: f"linear layer of {list(x.shape)} and {out_features} outputs",
    )
    return y


@torch.library.impl(_LIBRARY, "skinny_linear", "CPU")
def _skinny_linear_plain(
    x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int
) -> Tensor:
    raise NativeError("numadist::skinny_linear reads packed weights: torch.ops.mkldnn._reorder_linear_weight")


@torch.library.impl(_LIBRARY, "skinny_linear", "MkldnnCPU")
def _skinny_linear(x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int) -> Tensor:
    """More than 16 rows, which wait for arithmetic and not for weights, go to oneDNN."""
    if x.numel() > MAX_ROWS * x.shape[-1]:
        return _linear_pointwise(x, blob, bias, "none", [], "")
    return skinny_linear(x, blob, bias, out_features, width)


@torch.library.register_fake("numadist::skinny_linear", lib=_LIBRARY)
def _skinny_linear_fake(
    x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))
