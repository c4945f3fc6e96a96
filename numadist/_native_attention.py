"""The core's attention by ctypes; csrc/nd_core.h is its manual."""

import ctypes
import enum
from ctypes import POINTER, byref, c_int32, c_size_t, c_void_p

from numadist._native import check, lib

_Strides = ctypes.c_ssize_t * 3  # batch, head, row; in elements


class Attention(ctypes.Structure):
    """NdAttention."""

    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("mask", c_void_p),
        ("out", c_void_p),
        ("scratch", c_void_p),
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


lib.nd_attention_scratch.argtypes = [POINTER(Attention)]
lib.nd_attention_scratch.restype = c_size_t
lib.nd_attention.argtypes = [POINTER(Attention)]


def attention_runs() -> bool:
    """Whether this CPU has the kernel."""
    return bool(lib.nd_attention_runs())


def attention_scratch(call: Attention) -> int:
    """Bytes of scratch memory the call needs."""
    return lib.nd_attention_scratch(byref(call))


def attention(call: Attention) -> None:
    """Raises: NativeError for sizes it does not take, or on a CPU without the kernel."""
    what = f"attention of {call.heads} heads of {call.head_dim} over {call.kv_heads} KV heads"
    check(lib.nd_attention(byref(call)), what)
