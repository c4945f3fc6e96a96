"""`numadist::skinny_linear`: a linear layer of few rows on weights as oneDNN packs them.

In bf16 by AMX or AVX512-BF16, in f32 on any CPU.

The weights are those that `_linear_pointwise` reads, so a model has them once for both phases. Their layout is no
stable interface: `panel_width` tries the very weights against oneDNN, and a layer that differs stays with oneDNN.

Shapes: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from numadist._native import supported_isas
from numadist._native_kernels import lib
from numadist._native_replay import call, contiguous, kept
from numadist.errors import NativeError

MAX_ROWS = 16  # ND_SKINNY_ROWS
# Columns side by side in packed weights: bf16 of machines with AVX512-BF16, and with AMX; f32, which oneDNN cuts into
# 64 but for some numbers of outputs.
WIDTHS = {torch.bfloat16: (64, 32), torch.float32: (64, 48, 32, 16)}
# The ISAs whose kernels in bf16 are faster than oneDNN's, see docs/phases.md; the others are their references.
FAST_ISAS = ("amx_bf16", "avx512_bf16")
# Sums in f32 of another order, then rounded once. Another layout is wrong by 1.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
_FUNCTIONS = {torch.bfloat16: lib.nd_skinny_linear, torch.float32: lib.nd_skinny_linear_f32}

_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define("skinny_linear(Tensor x, Tensor blob, Tensor? bias, int out_features, int width) -> Tensor")


def panel_width(blob: Tensor) -> int | None:
    """Columns of a panel of packed weights, [N, K]; None if the layout is another, or the CPU has no fast kernel.

    Cost: a pass over the weights with two rows by oneDNN, and one for every width that would have as many bytes.
    """
    out_features, in_features = blob.shape
    if blob.dtype == torch.bfloat16 and (in_features % 2 or supported_isas()[0] not in FAST_ISAS):
        return None
    num_weights = torch.ops.mkldnn._nbytes(blob) / blob.dtype.itemsize
    possible = [
        width
        for width in WIDTHS.get(blob.dtype, ())
        if num_weights == in_features * -(-out_features // width) * width
    ]
    if not possible:
        return None
    x_MK = torch.randn(2, in_features, generator=torch.Generator().manual_seed(1)).to(blob.dtype)
    wanted = _linear_pointwise(x_MK, blob, None, "none", [], "").float()
    for width in possible:
        seen = skinny_linear(x_MK, blob, None, out_features, width).float()
        if (seen - wanted).abs().max() <= TOLERANCE[blob.dtype] * wanted.abs().max():
            return width
    return None


def skinny_linear(
    x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, width: int, isa: int = 0
) -> Tensor:
    """x W^T + bias, [..., K] -> [..., N], all of one dtype, on weights in panels of `width` columns.

    isa: of supported_isas(). Raises: NativeError above 16 rows, or for a dtype or width it has no kernel for.
    """
    if blob.dtype not in _FUNCTIONS:
        raise NativeError(
            f"a linear layer in {blob.dtype}: there are kernels in {', '.join(map(str, _FUNCTIONS))}"
        )
    x = contiguous(x)
    in_features = x.shape[-1]
    y = kept(x.new_empty((*x.shape[:-1], out_features)))
    call(
        _FUNCTIONS[blob.dtype],
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
