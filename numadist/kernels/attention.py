"""`numadist::attention`: scaled dot product attention of prompts and of single queries, in bf16, float16 and f32.

torch 2.13 multiplies bf16 attention in f32 where a CPU has no AMX, computes what a mask hides, and of a single query
rearranges all keys first. Ours multiplies bf16 by AVX512-BF16 where a CPU has it (attention-inl.h, attention_one-inl.h
in csrc/kernels/), and everything else in f32 on any CPU (attention_wide-inl.h).
"""

import functools

import torch
from torch import Tensor

from numadist import _native_kernels as native
from numadist._native import Dtype
from numadist._native_kernels import MaskKind
from numadist._native_replay import contiguous, kept
from numadist.errors import NativeError

MAX_HEAD_DIM = 256

_CODES = {torch.bfloat16: int(Dtype.BF16), torch.float16: int(Dtype.F16), torch.float32: int(Dtype.F32)}
_MASKS = {torch.bool: MaskKind.BOOL, torch.bfloat16: MaskKind.BF16, torch.float32: MaskKind.F32}

_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
# Takes any strides but of the last dim. Without the tag Inductor gives it those it was captured with, and copies a
# cache whose rows lie further apart, in every layer of every step.
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def takes(head_dim: int, dtype: torch.dtype, mask_dtype: torch.dtype | None) -> bool:
    """Whether the kernels compute such an attention; they run on any CPU."""
    head_fits = head_dim % 16 == 0 and 0 < head_dim <= MAX_HEAD_DIM
    return head_fits and dtype in _CODES and (mask_dtype is None or mask_dtype in _MASKS)


def pays(head_dim: int, dtype: torch.dtype, mask_dtype: torch.dtype | None, is_causal: bool) -> bool:
    """Whether the kernel takes this attention of several queries, and torch's is slower.

    With AMX torch multiplies bf16 faster than AVX512-BF16 can, but computes what the mask hides all the same: there
    only masked attention is taken over.
    """
    is_masked = is_causal or mask_dtype is not None
    torch_multiplies_fast = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return takes(head_dim, dtype, mask_dtype) and (is_masked or not torch_multiplies_fast)


@torch.library.impl(_LIBRARY, "attention", "CPU")
def attention(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    isa: int = 0,
) -> Tensor:
    """[B, H, S, D], laid out as [B, S, H, D]. Query head h reads KV head h // (H // G).

    mask: broadcasts to [B, H, S, T]; True where a query may look, or what is added to the scores.
    isa: of supported_isas(). Raises: NativeError for what `takes` refuses.
    """
    code = _CODES.get(q_BHSD.dtype)
    if code is None or not q_BHSD.dtype == k_BGTD.dtype == v_BGTD.dtype:
        raise NativeError(
            f"attention of {q_BHSD.dtype}, {k_BGTD.dtype}, {v_BGTD.dtype}: not of one dtype we have"
        )
    q_BHSD, k_BGTD, v_BGTD = (x if x.stride(-1) == 1 else contiguous(x) for x in (q_BHSD, k_BGTD, v_BGTD))
    out = kept(_empty_result(q_BHSD))
    mask_sizes, mask_data = None, None
    if mask is not None:
        if mask.stride(-1) != 1 or mask.shape[-1] != k_BGTD.shape[2]:
            mask = contiguous(mask.expand(*mask.shape[:-1], k_BGTD.shape[2]))
        mask_sizes, mask_data = (mask.dtype, mask.shape, mask.stride()), mask.data_ptr()
    sizes, scratch_bytes = _sizes(
        isa,
        code,
        q_BHSD.shape,
        q_BHSD.stride(),
        k_BGTD.shape,
        k_BGTD.stride(),
        v_BGTD.stride(),
        mask_sizes,
        is_causal,
        scale,
    )
    scratch = kept(torch.empty(scratch_bytes, dtype=torch.uint8))
    pointers = q_BHSD.data_ptr(), k_BGTD.data_ptr(), v_BGTD.data_ptr(), mask_data
    native.attention(isa, code, sizes, *pointers, out.data_ptr(), scratch.data_ptr())
    return out


# Kept: every layer of every step asks again, and filling the structure takes as long as a small kernel.
@functools.lru_cache(maxsize=1024)
def _sizes(
    isa: int,
    code: int,
    q_shape: torch.Size,
    q_stride: tuple[int, ...],
    k_shape: torch.Size,
    k_stride: tuple[int, ...],
    v_stride: tuple[int, ...],
    mask: tuple[torch.dtype, torch.Size, tuple[int, ...]] | None,
    is_causal: bool,
    scale: float,
) -> tuple[native.Attention, int]:
    """The call's sizes, and bytes of scratch memory it needs."""
    batch, heads, queries, head_dim = q_shape
    keys = k_shape[2]
    kind = MaskKind.NONE
    mask_stride: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        dtype, shape, stride = mask
        kind, mask_stride = _MASKS[dtype], _expanded(shape, stride, (batch, heads, queries, keys))
    sizes = native.Attention(
        q_stride=q_stride[:3],
        k_stride=k_stride[:3],
        v_stride=v_stride[:3],
        mask_stride=mask_stride,
        # As _empty_result makes it.
        out_stride=(queries * heads * head_dim, head_dim, heads * head_dim),
        batch=batch,
        heads=heads,
        kv_heads=k_shape[1],
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        mask_kind=kind,
        causal=is_causal,
        scale=scale,
    )
    return sizes, native.attention_scratch(isa, code, sizes)


def _expanded(shape: torch.Size, stride: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the first three dims of a mask that broadcasts to the wanted shape. Raises: NativeError."""
    missing = len(wanted) - len(shape)
    padded, strides = (1,) * missing + tuple(shape), (0,) * missing + stride
    if padded[-1] != wanted[-1] or any(n not in (1, w) for n, w in zip(padded, wanted, strict=True)):
        raise NativeError(f"a mask of {list(shape)} does not broadcast to {list(wanted)}")
    return tuple(0 if n == 1 else s for n, s in zip(padded[:3], strides[:3], strict=True))


@torch.library.register_fake("numadist::attention", lib=_LIBRARY)
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    return _empty_result(q)


def _empty_result(q_BHSD: Tensor) -> Tensor:
    """In the order in which the heads of a token are joined: no copy follows."""
    batch, heads, queries, head_dim = q_BHSD.shape
    return q_BHSD.new_empty((batch, queries, heads, head_dim)).transpose(1, 2)
