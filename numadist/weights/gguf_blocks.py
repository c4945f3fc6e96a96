"""Blocks of quantized numbers in GGUF files, taken apart into codes and scales; nothing is rounded.

Formats: ggml's block_q4_0 and so on, of ggml-common.h and its dequantize_row functions. A block holds 32 numbers, of
K-quants 256. Shapes: N rows, B blocks a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from numadist.kernels.quantized import Quantized, Scales


def unpack(kind: str, raw_NB: Tensor, in_features: int) -> Quantized:
    """raw_NB: uint8 [N, B, bytes of a block], of a kind in KINDS."""
    return KINDS[kind](raw_NB, in_features)


def _f16(raw: Tensor, first: int, count: int = 1) -> Tensor:
    return raw[..., first : first + 2 * count].contiguous().view(torch.float16)


def _halves(bytes_: Tensor) -> Tensor:
    """Low halves of the bytes, then high ones."""
    return torch.cat([bytes_ & 0xF, bytes_ >> 4], -1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bits of 4 bytes, each a number of 0 or 16."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _q8_0(raw: Tensor, in_features: int) -> Quantized:
    return Quantized(raw[..., 2:] ^ 0x80, _f16(raw, 0), None, 8, Scales.F16, in_features)


def _q4_0(raw: Tensor, in_features: int) -> Quantized:
    return Quantized(_halves(raw[..., 2:]), _f16(raw, 0), None, 4, Scales.F16, in_features)


def _q4_1(raw: Tensor, in_features: int) -> Quantized:
    return Quantized(_halves(raw[..., 4:]), _f16(raw, 0, 2), None, 4, Scales.F16_MIN, in_features)


def _q5_0(raw: Tensor, in_features: int) -> Quantized:
    codes = _halves(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return Quantized(codes, _f16(raw, 0), None, 5, Scales.F16, in_features)


def _q5_1(raw: Tensor, in_features: int) -> Quantized:
    codes = _halves(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return Quantized(codes, _f16(raw, 0, 2), None, 5, Scales.F16_MIN, in_features)


def _k_factors(packed: Tensor) -> Tensor:
    """8 factors of scales and of minima, 6 bits each in 12 bytes: [..., 12] -> [..., 8, 2]."""
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat([low & 63, high & 0xF | (low >> 6) << 4], -1)
    minimum = torch.cat([mid & 63, high >> 4 | (mid >> 6) << 4], -1)
    return torch.stack([scale, minimum], -1)


def _k_quant(raw: Tensor, codes: Tensor, bits: int, in_features: int) -> Quantized:
    """codes: [N, B, 256]. A block's 8 groups share two scales."""
    num_rows = len(raw)
    factors = _k_factors(raw[..., 4:16]).reshape(num_rows, -1, 2)
    return Quantized(
        codes.reshape(num_rows, -1, 32), _f16(raw, 0, 2), factors, bits, Scales.U8_MIN, in_features, shared=3
    )


def _q4_k(raw: Tensor, in_features: int) -> Quantized:
    codes = _halves(raw[..., 16:].reshape(*raw.shape[:2], 4, 32))
    return _k_quant(raw, codes.flatten(-2), 4, in_features)


def _q5_k(raw: Tensor, in_features: int) -> Quantized:
    halves = _halves(raw[..., 48:].reshape(*raw.shape[:2], 4, 32)).view(*raw.shape[:2], 4, 2, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(4, 2, 1)
    fifth = (raw[..., None, None, 16:48] >> shifts & 1) << 4
    return _k_quant(raw, (halves | fifth).flatten(-3), 5, in_features)


def _q6_k(raw: Tensor, in_features: int) -> Quantized:
    """Kept in 8 bits: the factors of 16 inputs each and the signs fit there."""
    low = raw[..., :128].reshape(*raw.shape[:2], 2, 64)
    low = torch.stack([low[..., :32], low[..., 32:]], -2)  # of each half of a block
    low = torch.cat([low & 0xF, low >> 4], -2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (raw[..., 128:192].reshape(*raw.shape[:2], 2, 1, 32) >> shifts & 3) << 4
    codes = (low | high) + (128 - 32)
    num_rows = len(raw)
    factors = raw[..., 192:208].contiguous().view(torch.int8).reshape(num_rows, -1, 2)
    return Quantized(
        codes.reshape(num_rows, -1, 32),
        _f16(raw, 208),
        factors,
        8,
        Scales.I8_HALF,
        in_features,
        shared=3,
    )


KINDS: dict[str, Callable[[Tensor, int], Quantized]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
