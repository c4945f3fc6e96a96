"""all_reduce together with what follows it in a transformer: bias, residual and norm, in one pass over the data."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from numadist import _native
from numadist._native import Dtype, Epilogue, Norm
from numadist.comm.dtypes import REDUCIBLE
from numadist.errors import CommError

_DTYPES = {Dtype.F32, Dtype.F16, Dtype.BF16}


class AfterSum(NamedTuple):
    """What follows a sum: y = sum + bias + residual; residual = y; out = norm(y) * weight + norm_bias, or y.

    Shapes: residual [..., D] as the sum; bias, weight, norm_bias [D].
    """

    residual: Tensor | None = None
    bias: Tensor | None = None
    weight: Tensor | None = None
    norm_bias: Tensor | None = None
    norm: Norm = Norm.NONE
    eps: float = 0.0


def all_reduce_fused(handle: int, x: Tensor, out: Tensor, after: AfterSum) -> int:
    """Sum x over the ranks of a handle of the core and finish it into out, in one pass.

    Returns the core's code. Shapes: x, out [..., D]. All tensors are of one dtype: f32, bf16 or f16.
    All arithmetic is f32, with one rounding where a result is stored; the norm reads the rounded y.
    Raises: CommError for tensors that do not fit.
    """
    residual, bias, weight, norm_bias, norm, eps = after
    num_cols = x.shape[-1]
    rows = [x, out] + [t for t in (residual,) if t is not None]
    columns = [t for t in (bias, weight, norm_bias) if t is not None]
    dtype = REDUCIBLE.get(x.dtype, (None, 0))[0]
    fits = dtype in _DTYPES and all(
        t.dtype == x.dtype and t.is_cpu and t.is_contiguous() for t in rows + columns
    )
    if not fits or any(t.shape != x.shape for t in rows) or any(t.shape != (num_cols,) for t in columns):
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in rows + columns)
        raise CommError(
            f"all_reduce with residual and norm takes contiguous CPU tensors of float32, bfloat16 or float16, the "
            f"rows of one shape and the others of its last dimension; got {shapes}"
        )

    def address(t: Tensor | None) -> int | None:
        return None if t is None else t.data_ptr()

    epilogue = Epilogue(
        num_cols, address(bias), address(residual), address(weight), address(norm_bias), norm, eps
    )
    num_rows = x.numel() // num_cols if num_cols else 0
    return _native.all_reduce_fused(handle, x.data_ptr(), out.data_ptr(), num_rows, int(dtype or 0), epilogue)


def finish_sum(total: Tensor, out: Tensor, after: AfterSum) -> None:
    """What all_reduce_fused does after the sum, by torch's operators."""
    residual, bias, weight, norm_bias, norm, eps = after
    y = total.float()
    y = y if bias is None else y + bias
    y = (y if residual is None else y + residual).to(total.dtype)
    if residual is not None:
        residual.copy_(y)
    shape = list(y.shape[-1:])
    if norm == Norm.RMS:
        y = F.rms_norm(y, shape, weight, eps)
        y = y if norm_bias is None else y + norm_bias
    elif norm == Norm.LAYER:
        y = F.layer_norm(y, shape, weight, norm_bias, eps)
    out.copy_(y)
