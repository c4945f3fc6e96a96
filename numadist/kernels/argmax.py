"""The highest logit of each row: what a greedy step needs of a rank."""

import torch
from torch import Tensor

from numadist._native import Dtype, lib
from numadist._native_replay import call

_CODES = {torch.float32: int(Dtype.F32), torch.bfloat16: int(Dtype.BF16)}


def takes(logits_BV: Tensor) -> bool:
    return logits_BV.dtype in _CODES and logits_BV.shape[-1] > 0 and logits_BV.stride(-1) == 1


def argmax(logits_BV: Tensor, first_token: int) -> Tensor:
    """int32 [B, 2]: bits of the highest value as float32, and first_token + its index; of equals the first.

    Raises: NativeError for what `takes` refuses.
    """
    num_rows, num_tokens = logits_BV.shape
    out = torch.empty((num_rows, 2), dtype=torch.int32)
    call(
        lib.nd_argmax,
        logits_BV.data_ptr(),
        _CODES.get(logits_BV.dtype, -1),
        num_rows,
        num_tokens,
        logits_BV.stride(0),
        first_token,
        out.data_ptr(),
        what=lambda: f"argmax of logits {list(logits_BV.shape)}, {logits_BV.dtype}",
    )
    return out
