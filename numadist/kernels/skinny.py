"""`numadist::skinny_linear`: a linear layer of few rows on weights as oneDNN packs them, by AVX512-BF16.

The weights are those that `_linear_pointwise` reads, so a model has them once for both phases. Their layout is no
stable interface: `takes` tries the very weights against oneDNN, and a layer that differs stays with oneDNN.

Shapes: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from numadist._native import lib, supported_isas
from numadist._native_replay import call, contiguous, kept
from numadist.errors import NativeError

MAX_ROWS = 16  # ND_SKINNY_ROWS
PANEL = 64  # ND_SKINNY_PANEL
# The ISA whose kernel is faster than oneDNN's, see benchmarks/skinny_linear.py; the others are its references.
FAST_ISA = "avx512_bf16"
# Both round to bf16 once, after sums in f32 of another order.
TOLERANCE = 1e-2

_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define("skinny_linear(Tensor x, Tensor blob, Tensor? bias, int out_features) -> Tensor")


def takes(blob: Tensor) -> bool:
    """Whether packed weights, [N, K], have the layout the kernel reads, and this CPU has the fast kernel.

    Cost: one pass over the weights with two rows, by either.
    """
    out_features, in_features = blob.shape
    if blob.dtype != torch.bfloat16 or in_features % 2 or supported_isas()[0] != FAST_ISA:
        return False
    panels = (out_features + PANEL - 1) // PANEL
    if torch.ops.mkldnn._nbytes(blob) != 2 * panels * PANEL * in_features:
        return False
    x_MK = torch.randn(2, in_features, generator=torch.Generator().manual_seed(1)).to(blob.dtype)
    wanted = _linear_pointwise(x_MK, blob, None, "none", [], "").float()
    seen = skinny_linear(x_MK, blob, None, out_features).float()
    return bool((seen - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def skinny_linear(x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int, isa: int = 0) -> Tensor:
    """x W^T + bias, [..., K] -> [..., N], by the isa-th of supported_isas(). Raises: NativeError above 16 rows."""
    x = contiguous(x)
    in_features = x.shape[-1]
    y = kept(x.new_empty((*x.shape[:-1], out_features)))
    call(
        lib.nd_skinny_linear,
        isa,
        x.data_ptr(),
        torch.ops.mkldnn.data_ptr.default(blob),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // in_features,
        out_features,
        in_features,
        what=lambda: f"linear layer of {list(x.shape)} and {out_features} outputs",
    )
    return y


@torch.library.impl(_LIBRARY, "skinny_linear", "CPU")
def _skinny_linear_plain(x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    raise NativeError("numadist::skinny_linear reads packed weights: torch.ops.mkldnn._reorder_linear_weight")


@torch.library.impl(_LIBRARY, "skinny_linear", "MkldnnCPU")
def _skinny_linear(x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """More than 16 rows, which wait for arithmetic and not for weights, go to oneDNN."""
    if x.numel() > MAX_ROWS * x.shape[-1]:
        return _linear_pointwise(x, blob, bias, "none", [], "")
    return skinny_linear(x, blob, bias, out_features)


@torch.library.register_fake("numadist::skinny_linear", lib=_LIBRARY)
def _skinny_linear_fake(x: Tensor, blob: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))
