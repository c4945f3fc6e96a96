"""Linear layers and embeddings on weights of 4, 5 and 8 bits as files have them, never widened in memory.

Weights are codes with scales by groups of 32 inputs. A product rounds its rows to 8 bits by the same groups and sums
whole numbers (csrc/kernels/quantized-inl.h), as llama.cpp does; a lookup gives the numbers of the format bit for bit.

Shapes: M rows, K inputs, N outputs, G groups of 32 inputs, S scales an output (one a group, or one for several), P
panels of 16 outputs.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from numadist._native import Dtype, supported_isas
from numadist._native_kernels import QuantizedWeights, lib
from numadist._native_replay import call, contiguous, kept

GROUP = 32
_OUTPUTS = 16
_STEPS, _STEP_INPUTS = 8, 4
# Better instruction sets have nothing more for them.
_USED = {"amx_bf16": "avx512_vnni", "avx512_bf16": "avx512_vnni"}
_CODES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


class Scales(enum.IntEnum):
    """NdScales: how a code becomes a weight."""

    F16 = 0  # scale * (code - 2^(bits - 1))
    F16_MIN = 1  # scale * code + minimum
    I8_HALF = 2  # scale * factor * (code - 2^(bits - 1)), a factor every 16 inputs
    U8_MIN = 3  # scale * factor * code - minimum * other factor

    @property
    def has_minimum(self) -> bool:
        return self in (Scales.F16_MIN, Scales.U8_MIN)


@dataclass(frozen=True)
class Quantized:
    """Weights as codes, in an order that people read.

    codes: uint8 [N, G, 32]. scale: f16 [N, S, 1], or [.., 2] with the minimum. factors: int8 or uint8 [N, G, 2].
    order: int32 [32 G], the input that each place takes, -1 for none; None: in order.
    """

    codes: Tensor
    scale: Tensor
    factors: Tensor | None
    bits: int
    kind: Scales
    in_features: int
    shared: int = 0  # log2 of the groups that share a scale
    order: Tensor | None = None

    @property
    def layout(self) -> str:
        """For people to read: what a group of 32 inputs has, or one of 16 or 2^shared groups."""
        if self.kind is Scales.I8_HALF:
            return f"{self.bits} bits, factor per {GROUP // 2}, scale per {GROUP << self.shared}"
        scale = "scale and minimum" if self.kind.has_minimum else "scale"
        if self.factors is None:
            return f"{self.bits} bits, {scale} per {GROUP}"
        return f"{self.bits} bits, two factors per {GROUP}, {scale} per {GROUP << self.shared}"

    @property
    def bytes_per_weight(self) -> float:
        """In memory, codes and scales."""
        numbers = 2 if self.kind.has_minimum else 1
        factors = 0 if self.factors is None else 2
        return self.bits / 8 + (2 * numbers / (1 << self.shared) + factors) / GROUP

    def outputs(self, chosen: Tensor) -> "Quantized":
        """Of these outputs, in this order."""
        factors = None if self.factors is None else self.factors[chosen]
        return replace(self, codes=self.codes[chosen], scale=self.scale[chosen], factors=factors)

    def inputs(self, ranges: Sequence[tuple[int, int]]) -> "Quantized":
        """Of the inputs in these ranges, one behind the other. Of a group that is cut the other places are unused."""
        chosen = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        local = torch.full(
            (self.in_features + 1,), -1, dtype=torch.int32
        )  # the last: of places that take none
        local[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        places = torch.arange(self.codes.shape[1] * GROUP)
        taken = places.clamp(max=self.in_features) if self.order is None else self.order.long()
        order_GI = local[taken].view(-1, GROUP)
        groups = (order_GI >= 0).any(1).nonzero()[:, 0]
        shares = groups >> self.shared
        shared = _largest_share(shares, self.shared)
        return replace(
            self,
            codes=self.codes[:, groups],
            scale=self.scale[:, shares[:: 1 << shared]],
            factors=None if self.factors is None else self.factors[:, groups],
            in_features=len(chosen),
            shared=shared,
            order=unless_straight(order_GI[groups].reshape(-1), len(chosen)),
        )

    def widened(self) -> Tensor:
        """The weights in float32 [N, K], bit for bit as the format says."""
        width = self.codes.shape[1]
        scale = self.scale.float().repeat_interleave(1 << self.shared, 1)[:, :width]
        codes = self.codes.float()
        if self.kind.has_minimum:
            by, minimum = scale[..., :1], scale[..., 1:]
            if self.factors is not None:
                by, minimum = by * self.factors[..., :1], minimum * -self.factors[..., 1:].float()
            places = by * codes + minimum
        else:
            if self.factors is not None:
                scale = (scale * self.factors).repeat_interleave(GROUP // 2, 2)
            places = scale * (codes - (1 << (self.bits - 1)))
        places = places.flatten(1)
        if self.order is None:
            return places[:, : self.in_features].contiguous()
        out = places.new_empty(len(places), self.in_features)
        used = self.order >= 0
        out[:, self.order[used].long()] = places[:, used]
        return out


def unless_straight(order: Tensor, in_features: int) -> Tensor | None:
    """An order as Quantized has it: None where places take the inputs one after the other."""
    straight = torch.arange(len(order), dtype=torch.int32)
    straight[in_features:] = -1
    return None if torch.equal(order, straight) else order


def _largest_share(shares: Tensor, limit: int) -> int:
    """log2 of how many neighbouring groups still share a scale, at most limit."""
    for shared in range(limit, 0, -1):
        first = shares[:: 1 << shared].repeat_interleave(1 << shared)[: len(shares)]
        if torch.equal(first, shares):
            return shared
    return 0


@dataclass(frozen=True)
class Packed:
    """Weights as the kernels read them. codes: uint8 [P, G, 64 bits]. scales: uint8 [P, bytes]."""

    codes: Tensor
    scales: Tensor
    order: Tensor | None
    out_features: int
    in_features: int
    kind: Scales
    shared: int


def pack(q: Quantized, num_experts: int = 1) -> Packed:
    """The layout that csrc/nd_core.h tells. num_experts: that q has the outputs of, one behind the other."""
    num_out, num_groups = len(q.codes) // num_experts, q.codes.shape[1]
    panels = num_experts * -(-num_out // _OUTPUTS)

    def in_panels(t: Tensor) -> Tensor:
        padded = t.new_zeros(num_experts, panels // num_experts * _OUTPUTS, *t.shape[1:])
        padded[:, :num_out] = t.view(num_experts, num_out, *t.shape[1:])
        return padded.view(panels, _OUTPUTS, *t.shape[1:])

    steps = in_panels(q.codes).view(panels, _OUTPUTS, num_groups, _STEPS, _STEP_INPUTS)
    steps = steps.permute(0, 2, 3, 1, 4).reshape(panels, num_groups, _STEPS, _OUTPUTS * _STEP_INPUTS)
    if q.bits == 8:
        codes = steps
    else:
        codes = steps[:, :, ::2] & 0xF | (steps[:, :, 1::2] & 0xF) << 4
        if q.bits == 5:
            fifth = torch.zeros_like(codes[:, :, :1])
            for step in range(_STEPS):
                fifth |= (steps[:, :, step : step + 1] >> 4) << step
            codes = torch.cat([codes, fifth], 2)
    scales = [in_panels(q.scale).permute(0, 2, 3, 1).reshape(panels, -1).view(torch.uint8)]
    if q.factors is not None:
        factors = in_panels(q.factors.view(torch.uint8))
        scales.append(factors.permute(0, 2, 3, 1).reshape(panels, -1))
    return Packed(
        codes.reshape(panels, num_groups, -1),
        torch.cat(scales, 1),
        q.order,
        num_out,
        q.in_features,
        q.kind,
        q.shared,
    )


# Weights whose largest lies outside have scales that f16 rounds badly, or not at all.
_LARGEST_FROM, _LARGEST_TO = 2.0**-11, 2.0**15


def quantize(w_NK: Tensor, bits: int) -> Quantized:
    """Weights rounded by groups of 32 inputs: of 8 bits around zero, of 4 between each group's least and greatest.

    Raises: ValueError for other numbers of bits, or weights that scales in f16 do not fit.
    """
    largest = float(w_NK.abs().max())
    if largest != 0 and not _LARGEST_FROM <= largest <= _LARGEST_TO:
        raise ValueError(f"scales in f16 do not fit weights of which the largest is {largest:.3g}")
    num_out, num_in = w_NK.shape
    groups = -(-num_in // GROUP)
    w = w_NK.new_zeros(num_out, groups * GROUP, dtype=torch.float32)
    w[:, :num_in] = w_NK
    w = w.view(num_out, groups, GROUP)
    if bits == 8:
        scale = (w.abs().amax(2, keepdim=True) / 127).half()
        codes = (w / _not_zero(scale)).round().clamp(-127, 127) + 128
        return Quantized(codes.to(torch.uint8), scale, None, 8, Scales.F16, num_in)
    if bits == 4:
        least = w.amin(2, keepdim=True).half()
        scale = ((w.amax(2, keepdim=True) - least.float()) / 15).clamp(min=0).half()
        codes = ((w - least.float()) / _not_zero(scale)).round().clamp(0, 15)
        return Quantized(codes.to(torch.uint8), torch.cat([scale, least], 2), None, 4, Scales.F16_MIN, num_in)
    raise ValueError(f"weights are quantized to 4 or 8 bits, not {bits}")


def kernel_name() -> str:
    """What multiplies by codes, for people to read."""
    return f"codes of 4, 5 and 8 bits by our {_USED.get(supported_isas()[0], supported_isas()[0])} kernels"


def _not_zero(scale: Tensor) -> Tensor:
    return scale.float().masked_fill(scale == 0, 1.0)


_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_WEIGHTS = "Tensor codes, Tensor scales, Tensor? order"
_LAYOUT = "int out_features, int in_features, int kind, int shared"
_LIBRARY.define(f"quantized_linear(Tensor x, {_WEIGHTS}, Tensor? bias, {_LAYOUT}) -> Tensor")
_LIBRARY.define(f"quantized_experts(Tensor x, Tensor ends, {_WEIGHTS}, {_LAYOUT}) -> Tensor")
_LIBRARY.define(f"quantized_embedding(Tensor ids, {_WEIGHTS}, {_LAYOUT}, ScalarType dtype) -> Tensor")


def _described(
    codes: Tensor, scales: Tensor, order: Tensor | None, layout: Sequence[int]
) -> QuantizedWeights:
    out_features, in_features, kind, shared = layout
    return QuantizedWeights(
        codes.data_ptr(),
        scales.data_ptr(),
        None if order is None else order.data_ptr(),
        out_features,
        in_features,
        codes.shape[1],
        scales.shape[1],
        codes.shape[2] * 8 // (_OUTPUTS * GROUP),
        kind,
        shared,
    )


@torch.library.impl(_LIBRARY, "quantized_linear", "CPU")
def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    *layout: int,
    isa: int = 0,
) -> Tensor:
    """x W^T + bias in x's dtype, [..., K] -> [..., N]. isa: of supported_isas(). Weights: the fields of Packed.

    Raises: NativeError for a dtype other than float32, bfloat16 and float16.
    """
    x = contiguous(x)
    out_features, in_features, _, _ = layout
    num_rows = x.numel() // in_features
    y = kept(x.new_empty((*x.shape[:-1], out_features)))
    scratch = kept(x.new_empty(lib.nd_quantized_linear_scratch(num_rows, codes.shape[1]), dtype=torch.uint8))
    call(
        lib.nd_quantized_linear,
        isa,
        int(_CODES.get(x.dtype, -1)) if bias is None or bias.dtype == x.dtype else -1,
        x.data_ptr(),
        _described(codes, scales, order, layout),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        scratch.data_ptr(),
        num_rows,
        what=lambda: f"quantized linear layer of {list(x.shape)} {x.dtype} and {out_features} outputs",
    )
    return y


@torch.library.impl(_LIBRARY, "quantized_experts", "CPU")
def quantized_experts(
    x: Tensor,
    ends: Tensor,
    codes: Tensor,
    scales: Tensor,
    order: Tensor | None,
    *layout: int,
    isa: int = 0,
) -> Tensor:
    """Rows times the weights of the expert of each, [M, K] -> [M, N]; ends: int32, the row behind those of an expert.

    Raises: NativeError for a dtype other than float32, bfloat16 and float16, or ends that are not of these rows.
    """
    x, ends = contiguous(x), contiguous(ends.int())
    y = kept(x.new_empty((len(x), layout[0])))
    scratch = kept(x.new_empty(lib.nd_quantized_linear_scratch(len(x), codes.shape[1]), dtype=torch.uint8))
    call(
        lib.nd_quantized_experts,
        isa,
        int(_CODES.get(x.dtype, -1)),
        x.data_ptr(),
        _described(codes, scales, order, layout),
        ends.data_ptr(),
        len(ends),
        y.data_ptr(),
        scratch.data_ptr(),
        len(x),
        what=lambda: f"{len(ends)} quantized experts of {list(x.shape)} {x.dtype}",
    )
    return y


@torch.library.impl(_LIBRARY, "quantized_embedding", "CPU")
def quantized_embedding(
    ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    order: Tensor | None,
    out_features: int,
    in_features: int,
    kind: int,
    shared: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows of the table by their numbers: int64 [...] -> [..., K] of dtype.

    Raises: NativeError for a number outside the table.
    """
    ids = contiguous(ids.long())
    out = kept(codes.new_empty((*ids.shape, in_features), dtype=dtype))
    call(
        lib.nd_quantized_lookup,
        int(_CODES.get(dtype, -1)),
        _described(codes, scales, order, (out_features, in_features, kind, shared)),
        ids.data_ptr(),
        ids.numel(),
        out.data_ptr(),
        what=lambda: f"lookup of {ids.numel()} rows in a quantized table of {out_features}",
    )
    return out


@torch.library.register_fake("numadist::quantized_linear", lib=_LIBRARY)
def _quantized_linear_fake(
    x: Tensor, codes: Tensor, scales: Tensor, order: Tensor | None, bias: Tensor | None, *layout: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], layout[0]))


@torch.library.register_fake("numadist::quantized_experts", lib=_LIBRARY)
def _quantized_experts_fake(
    x: Tensor, ends: Tensor, codes: Tensor, scales: Tensor, order: Tensor | None, *layout: int
) -> Tensor:
    return x.new_empty((x.shape[0], layout[0]))


@torch.library.register_fake("numadist::quantized_embedding", lib=_LIBRARY)
def _quantized_embedding_fake(
    ids: Tensor, codes: Tensor, scales: Tensor, order: Tensor | None, *layout_and_dtype: Any
) -> Tensor:
    _, in_features, _, _, dtype = layout_and_dtype
    return codes.new_empty((*ids.shape, in_features), dtype=dtype)
