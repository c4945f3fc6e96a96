"""`numadist::attention`: scaled dot product attention of a prefill in bf16, by AVX512-BF16 products.

torch 2.13 multiplies bf16 attention in f32 where a CPU has no AMX, and computes what a mask hides. csrc/attention.h.
"""

import torch
from torch import Tensor

from numadist import _native
from numadist import _native_attention as native
from numadist._native_attention import MaskKind, attention_runs

MAX_HEAD_DIM = 256
_native.use_openmp()

_MASKS = {torch.bool: MaskKind.BOOL, torch.bfloat16: MaskKind.BF16, torch.float32: MaskKind.F32}

_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> Tensor"
)


def takes(head_dim: int, dtype: torch.dtype, mask_dtype: torch.dtype | None) -> bool:
    """Whether this CPU has the kernel, and it computes such an attention."""
    fits = head_dim % 32 == 0 and 0 < head_dim <= MAX_HEAD_DIM
    return (
        attention_runs() and fits and dtype == torch.bfloat16 and (mask_dtype is None or mask_dtype in _MASKS)
    )


@torch.library.impl(_LIBRARY, "attention", "CPU")
def _attention(
    q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """[B, H, S, D], laid out as [B, S, H, D]. Query head h reads KV head h // (H // G).

    mask: broadcasts to [B, H, S, T]; True where a query may look, or what is added to the scores.
    Raises: NativeError for what `takes` refuses.
    """
    q_BHSD, k_BGTD, v_BGTD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHSD, k_BGTD, v_BGTD))
    batch, heads, queries, head_dim = q_BHSD.shape
    out = _empty_result(q_BHSD)
    kind = MaskKind.NONE
    if mask is not None:
        kind = _MASKS[mask.dtype]
        mask = mask.expand(batch, heads, queries, k_BGTD.shape[2])
        if mask.stride(-1) != 1:
            mask = mask.contiguous()
    call = native.Attention(
        q=q_BHSD.data_ptr(),
        k=k_BGTD.data_ptr(),
        v=v_BGTD.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        out=out.data_ptr(),
        q_stride=q_BHSD.stride()[:3],
        k_stride=k_BGTD.stride()[:3],
        v_stride=v_BGTD.stride()[:3],
        mask_stride=(0, 0, 0) if mask is None else mask.stride()[:3],
        out_stride=out.stride()[:3],
        batch=batch,
        heads=heads,
        kv_heads=k_BGTD.shape[1],
        queries=queries,
        keys=k_BGTD.shape[2],
        head_dim=head_dim,
        mask_kind=kind,
        causal=is_causal,
        scale=scale,
    )
    scratch = torch.empty(native.attention_scratch(call), dtype=torch.uint8)
    call.scratch = scratch.data_ptr()
    native.attention(call)
    return out


@torch.library.register_fake("numadist::attention", lib=_LIBRARY)
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    return _empty_result(q)


def _empty_result(q_BHSD: Tensor) -> Tensor:
    """In the order in which the heads of a token are joined: no copy follows."""
    batch, heads, queries, head_dim = q_BHSD.shape
    return q_BHSD.new_empty((batch, queries, heads, head_dim)).transpose(1, 2)
