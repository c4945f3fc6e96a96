"""`numadist::skinny_linear_f32`: what skinny.py does in bf16, in f32 and on any CPU.

No faster than oneDNN where memory is the limit, but its calls can be recorded (numadist/_native_replay.py).

Shapes: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from numadist._native_kernels import lib
from numadist._native_replay import call, contiguous, kept
from numadist.errors import NativeError
from numadist.kernels.skinny import MAX_ROWS

# Columns of a panel: 64 is what oneDNN 3.12 chooses, and with AVX2 for some numbers of outputs 16.
WIDTHS = (64, 48, 32, 16)
# Sums of other order, relative to the largest output; another layout is wrong by 1.
TOLERANCE = 1e-4

_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define(
    "skinny_linear_f32(Tensor x, Tensor blob, Tensor? bias, int out_features, int width) -> Tensor"
)


def panel_width(blob: Tensor) -> int | None:
    """Of packed weights, [N, K], whose layout the kernel reads; None for any other.

    Cost: a pass over the weights with two rows by oneDNN, and one a width that would have as many bytes.
    """
    if blob.dtype != torch.float32:
        return None
    out_features, in_features = blob.shape
    num_bytes = torch.ops.mkldnn._nbytes(blob)
    x_MK = torch.randn(2, in_features, generator=torch.Generator().manual_seed(1))
    wanted = _linear_pointwise(x_MK, blob, None, "none", [], "")
    for width in WIDTHS:
        if num_bytes != 4 * -(-out_features // width) * width * in_features:
            continue
        seen = skinny_linear_f32(x_MK, blob, None, out_features, width)
        if (seen - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
            return width
    return None


def skinny_linear_f32(
    x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int, isa: int = 0
) -> Tensor:
    """x W^T + bias, [..., K] -> [..., N], by the isa-th of supported_isas(). Raises: NativeError above 16 rows."""
    x = contiguous(x)
    in_features = x.shape[-1]
    y = kept(x.new_empty((*x.shape[:-1], out_features)))
    call(
        lib.nd_skinny_linear_f32,
        isa,
        x.data_ptr(),
        torch.ops.mkldnn.data_ptr.default(blob),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // in_features,
        out_features,
        in_features,
        width,
        what=lambda: f"linear layer of {list(x.shape)} and {out_features} outputs in panels of {width}",
    )
    return y


@torch.library.impl(_LIBRARY, "skinny_linear_f32", "CPU")
def _skinny_linear_plain(
    x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int
) -> Tensor:
    raise NativeError(
        "numadist::skinny_linear_f32 reads packed weights: torch.ops.mkldnn._reorder_linear_weight"
    )


@torch.library.impl(_LIBRARY, "skinny_linear_f32", "MkldnnCPU")
def _skinny_linear(x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int) -> Tensor:
    """More than 16 rows go to oneDNN."""
    if x.numel() > MAX_ROWS * x.shape[-1]:
        return _linear_pointwise(x, blob, bias, "none", [], "")
    return skinny_linear_f32(x, blob, bias, out_features, width)


@torch.library.register_fake("numadist::skinny_linear_f32", lib=_LIBRARY)
def _skinny_linear_fake(
    x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))
