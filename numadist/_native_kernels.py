"""The core's attention and some of its linear layers by ctypes; csrc/nd_core.h is their manual."""

import ctypes
import enum
from ctypes import POINTER, byref, c_int, c_int32, c_size_t, c_void_p

from numadist._native import lib
from numadist._native_replay import call

_Strides = ctypes.c_ssize_t * 3  # batch, head, row; in elements


class Attention(ctypes.Structure):
    """NdAttention: sizes of a call."""

    _fields_ = [
        ("q_stride", _Strides),
        ("k_stride", _Strides),
        ("v_stride", _Strides),
        ("mask_stride", _Strides),
        ("out_stride", _Strides),
        ("batch", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("queries", c_int32),
        ("keys", c_int32),
        ("head_dim", c_int32),
        ("mask_kind", c_int32),
        ("causal", c_int32),
        ("scale", ctypes.c_float),
    ]


class MaskKind(enum.IntEnum):
    """NdMask."""

    NONE = 0
    BOOL = 1
    BF16 = 2
    F32 = 3


# isa, dtype, sizes
lib.nd_attention_scratch.argtypes = [c_int, c_int, POINTER(Attention)]
lib.nd_attention_scratch.restype = c_size_t
# isa, dtype, sizes, q, k, v, mask, out, scratch
lib.nd_attention.argtypes = [*lib.nd_attention_scratch.argtypes, *[c_void_p] * 6]
# logits, dtype, rows, cols, row stride, first, out
lib.nd_argmax.argtypes = [c_void_p, c_int, c_size_t, c_size_t, c_size_t, c_int32, c_void_p]
lib.nd_skinny_linear_f32.argtypes = lib.nd_skinny_linear.argtypes
# rows, k
lib.nd_half_linear_scratch.argtypes = [c_size_t, c_size_t]
lib.nd_half_linear_scratch.restype = c_size_t
# isa, dtype, x, blob, bias, y, scratch, rows, n, k, width
lib.nd_half_linear.argtypes = [c_int, c_int, *[c_void_p] * 5, *[c_size_t] * 4]


class QuantizedWeights(ctypes.Structure):
    """NdQuantized: a weight as codes and scales, and how they lie."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("order", c_void_p),
        ("n", c_size_t),
        ("k", c_size_t),
        ("groups", c_size_t),
        ("panel_scale_bytes", c_size_t),
        ("bits", c_int32),
        ("kind", c_int32),
        ("shared", c_int32),
    ]


# rows, groups
lib.nd_quantized_linear_scratch.argtypes = [c_size_t, c_size_t]
lib.nd_quantized_linear_scratch.restype = c_size_t
# isa, dtype, x, weights, bias, y, scratch, rows
lib.nd_quantized_linear.argtypes = [
    c_int,
    c_int,
    c_void_p,
    POINTER(QuantizedWeights),
    *[c_void_p] * 3,
    c_size_t,
]
# isa, dtype, x, weights, ends, experts, y, scratch, rows
lib.nd_quantized_experts.argtypes = [
    c_int,
    c_int,
    c_void_p,
    POINTER(QuantizedWeights),
    c_void_p,
    c_size_t,
    *[c_void_p] * 2,
    c_size_t,
]
# dtype, weights, outputs, count, out
lib.nd_quantized_lookup.argtypes = [c_int, POINTER(QuantizedWeights), c_void_p, c_size_t, c_void_p]


def attention_scratch(isa: int, dtype: int, sizes: Attention) -> int:
    """Bytes of scratch memory a call needs."""
    return lib.nd_attention_scratch(isa, dtype, byref(sizes))


def attention(
    isa: int, dtype: int, sizes: Attention, q: int, k: int, v: int, mask: int | None, out: int, scratch: int
) -> None:
    """Addresses of tensors of these sizes; isa: of supported_isas().

    Raises: NativeError for what it does not take.
    """
    call(lib.nd_attention, isa, dtype, sizes, q, k, v, mask, out, scratch, what=lambda: _described(sizes))


def _described(sizes: Attention) -> str:
    heads = f"{sizes.heads} heads of {sizes.head_dim} over {sizes.kv_heads} KV heads"
    return f"attention of {sizes.queries} queries of {heads}"
