"""Weights as AWQ, GPTQ and compressed-tensors keep them in safetensors, taken apart into codes and scales.

Layouts: AutoAWQ's GEMM, AutoGPTQ's and GPTQModel's (v1 keeps zeros less one), and the formats pack-quantized and
int-quantized of compressed-tensors. Shapes: K inputs, N outputs, S scales an output.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from numadist.errors import ShardError
from numadist.kernels.quantized import GROUP, Quantized, Scales, unless_straight

# AWQ packs outputs 0, 2, 4, 6, 1, 3, 5, 7 of each 8 into a word, lowest bits first.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Scheme:
    """How a folder's layers are quantized. zero_offset: what GPTQ's zeros lack. group_sizes: of any layers.

    required: pieces that no layer does without, of those that others may lack.
    """

    method: str
    bits: int
    zero_offset: int = 0
    group_sizes: frozenset[int] = frozenset()
    required: frozenset[str] = frozenset()

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of a layer's tensors, behind its own; the first says that it is quantized."""
        return {
            "awq": ("qweight", "qzeros", "scales"),
            "gptq": ("qweight", "qzeros", "scales", "g_idx"),
            "pack-quantized": (
                "weight_packed",
                "weight_scale",
                "weight_zero_point",
                "weight_g_idx",
                "weight_shape",
            ),
            "int-quantized": ("weight_scale", "weight", "weight_zero_point"),
        }[self.method]


def scheme_of(config: Mapping[str, Any] | None, where: object) -> Scheme | None:
    """Of a config's quantization_config; None without one. Raises: ShardError that names one we do not read."""
    if config is None:
        return None
    method = str(config.get("quant_method"))
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        if config.get("bits", 4) == 4 and version == "gemm":
            return Scheme("awq", 4, group_sizes=_group_sizes([config]))
        raise _refused(where, f"AWQ of {config.get('bits')} bits, version {version}")
    if method == "gptq":
        version = str(config.get("checkpoint_format", "gptq"))
        if config.get("bits") in (4, 8) and version in ("gptq", "gptq_v2"):
            ordered = frozenset({"g_idx"} if config.get("desc_act") else ())
            return Scheme("gptq", config["bits"], int(version == "gptq"), _group_sizes([config]), ordered)
        raise _refused(where, f"GPTQ of {config.get('bits')} bits, format {version}")
    if method == "compressed-tensors":
        return _compressed(config, where)
    raise _refused(where, method)


def _compressed(config: Mapping[str, Any], where: object) -> Scheme:
    form = str(config.get("format"))
    groups = list((config.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    bits = {w.get("num_bits") for w in weights}
    wanted = {"pack-quantized": ({4}, {8}), "int-quantized": ({8},)}.get(form, ())
    if bits not in wanted or any(w.get("type", "int") != "int" for w in weights):
        raise _refused(where, f"compressed-tensors of format {form}, {sorted(map(str, bits))} bits")
    required = set()
    if all(w.get("symmetric") is False for w in weights):
        required.add("weight_zero_point")
    if all(w.get("actorder") in ("group", "dynamic") for w in weights):
        required.add("weight_g_idx")
    return Scheme(form, bits.pop(), 0, _group_sizes(weights), frozenset(required))


def _group_sizes(options: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """0: of one scale an output. Empty where the config does not say."""
    sizes = set()
    for one in options:
        size = one.get("group_size", one.get("q_group_size"))
        if size is not None or one.get("strategy") in ("channel", "tensor"):
            sizes.add(max(0, size or 0))
    return frozenset(sizes)


def _refused(where: object, what: str) -> ShardError:
    return ShardError(
        f"{where} is quantized by {what}; numadist reads GGUF files, AWQ of 4 bits, GPTQ of 4 and 8, "
        "compressed-tensors of whole numbers of 4 and 8 bits, and plain safetensors"
    )


@dataclass(frozen=True)
class Parts:
    """A layer. codes: uint8 [N, K]. scale, zero: [N, S]; no zero: 2^(bits - 1). group_of: [K], an input's scale."""

    bits: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    group_of: Tensor

    def widened(self) -> Tensor:
        """The weights in f32 [N, K]."""
        zero = 1 << (self.bits - 1) if self.zero is None else self.zero[:, self.group_of]
        return self.scale.float()[:, self.group_of] * (self.codes.float() - zero)


def take_apart(scheme: Scheme, pieces: Mapping[str, Tensor], name: str) -> Parts:
    """A layer's tensors.

    Raises: ShardError that says `name`, for some that do not belong together, or scales that are no numbers.
    """
    try:
        if lacking := sorted(scheme.required - pieces.keys()):
            raise ValueError(f"no {lacking[0]}")
        parts = _PARTS[scheme.method](scheme, pieces)
        num_out, num_in = parts.codes.shape
        num_scales = parts.scale.shape[1]
        if len(parts.scale) != num_out or parts.group_of.shape != (num_in,):
            raise ValueError(
                f"codes of {num_out} outputs and {num_in} inputs, scales of {list(parts.scale.shape)}"
            )
        if not parts.scale.is_floating_point():
            raise ValueError(f"scales are {parts.scale.dtype}")
        if parts.zero is not None and parts.zero.shape != parts.scale.shape:
            raise ValueError(f"scales of {list(parts.scale.shape)}, zeros of {list(parts.zero.shape)}")
        if int(parts.group_of.min()) < 0 or int(parts.group_of.max()) >= num_scales:
            raise ValueError(f"{num_scales} scales for inputs of {int(parts.group_of.max()) + 1} groups")
    except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ShardError(f"{name}: its quantized tensors do not belong together: {error}") from error
    if not parts.scale.isfinite().all():
        raise ShardError(f"{name} has scales that are no numbers; the file is damaged")
    if parts.zero is not None and (parts.zero == 1 << (parts.bits - 1)).all():
        return replace(parts, zero=None)
    return parts


def _gptq(scheme: Scheme, pieces: Mapping[str, Tensor]) -> Parts:
    codes_KN = _words(pieces["qweight"].t(), scheme.bits).t()
    # A zero of 0 was kept as the greatest number.
    zeros = (_words(pieces["qzeros"], scheme.bits).to(torch.int16) + scheme.zero_offset) % (1 << scheme.bits)
    scale_SN = pieces["scales"]
    group_of = pieces.get("g_idx")
    if group_of is None:
        group_of = _even_groups(scheme, len(codes_KN), len(scale_SN))
    return Parts(scheme.bits, codes_KN.t(), scale_SN.t(), zeros.t(), group_of.long())


def _awq(scheme: Scheme, pieces: Mapping[str, Tensor]) -> Parts:
    def in_order(words: Tensor) -> Tensor:
        values = _words(words, 4).view(len(words), -1, 8)
        return values[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1)

    codes_KN, scale_SN = in_order(pieces["qweight"]), pieces["scales"]
    zeros = in_order(pieces["qzeros"]).to(torch.int16)
    groups = _even_groups(scheme, len(codes_KN), len(scale_SN))
    return Parts(4, codes_KN.t(), scale_SN.t(), zeros.t(), groups)


def _packed(scheme: Scheme, pieces: Mapping[str, Tensor]) -> Parts:
    num_out, num_in = pieces["weight_shape"].long().tolist()
    codes_NK = _words(pieces["weight_packed"], scheme.bits)[:num_out, :num_in]
    scale_NS = _of_outputs(pieces["weight_scale"], num_out)
    zeros = pieces.get("weight_zero_point")
    if zeros is not None:
        zeros = _words(zeros.t().contiguous(), scheme.bits).t()[:num_out].to(torch.int16)
    group_of = pieces.get("weight_g_idx")
    if group_of is None or (group_of < 0).any():
        group_of = _even_groups(scheme, num_in, scale_NS.shape[1])
    return Parts(scheme.bits, codes_NK, scale_NS, zeros, group_of.long())


def _whole_numbers(scheme: Scheme, pieces: Mapping[str, Tensor]) -> Parts:
    if pieces["weight"].dtype is not torch.int8:
        raise ValueError(f"numbers are {pieces['weight'].dtype}, not int8")
    codes_NK = (pieces["weight"].to(torch.int16) + 128).to(torch.uint8)
    scale_NS = _of_outputs(pieces["weight_scale"], len(codes_NK))
    zeros = pieces.get("weight_zero_point")
    if zeros is not None:
        zeros = _of_outputs(zeros, len(codes_NK)).to(torch.int16) + 128
    return Parts(8, codes_NK, scale_NS, zeros, _even_groups(scheme, codes_NK.shape[1], scale_NS.shape[1]))


_PARTS = {"gptq": _gptq, "awq": _awq, "pack-quantized": _packed, "int-quantized": _whole_numbers}


def _words(words: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits in int32 words, lowest bits first: [R, C] -> uint8 [R, C * 32 / bits]."""
    if words.dtype is not torch.int32:
        raise ValueError(f"numbers are packed in {words.dtype}, not in int32")
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    return torch.stack([bytes_ & 0xF, bytes_ >> 4], -1).flatten(1)


def _of_outputs(values: Tensor, num_out: int) -> Tensor:
    """[N, S] of what a file may keep as one number of the whole layer, or one of each output."""
    if values.dim() == 1:
        values = values[:, None]
    return values.expand(num_out, 1) if values.numel() == 1 else values


def _even_groups(scheme: Scheme, num_in: int, num_scales: int) -> Tensor:
    """Where the file does not say which inputs a scale is for; the last scale may be for fewer than the others."""
    sizes = {size or num_in for size in scheme.group_sizes}
    if not sizes and num_scales > 0 and num_in % num_scales == 0:
        sizes = {num_in // num_scales}
    sizes = {size for size in sizes if size > 0 and math.ceil(num_in / size) == num_scales}
    if len(sizes) != 1:
        raise ValueError(f"{num_scales} scales for {num_in} inputs, groups of {sorted(scheme.group_sizes)}")
    return torch.arange(num_in) // sizes.pop()


def coded(parts: Parts, outputs: Tensor | None) -> Quantized | None:
    """The layer, of these outputs or all, in groups of 32 inputs of one scale; None where our layouts do not hold it.

    Inputs of a scale come side by side; the last of its groups may have places that none takes.
    """
    chosen = torch.arange(len(parts.codes)) if outputs is None else outputs
    bits, group_of_K = parts.bits, parts.group_of
    codes_NK, scale_NS = parts.codes[chosen], parts.scale[chosen]
    zero_NS = None if parts.zero is None else parts.zero[chosen]
    scale = scale_NS.half()
    if not torch.equal(scale.float(), scale_NS.float()) or (bits == 8 and zero_NS is not None):
        return None
    num_out, num_in = codes_NK.shape
    sorted_K = group_of_K.argsort(stable=True)
    sizes = group_of_K.bincount(minlength=scale.shape[1])
    groups_of = -(-sizes // GROUP)  # groups of 32 that each scale has
    first_place = (groups_of.cumsum(0) - groups_of) * GROUP
    first_input = sizes.cumsum(0) - sizes
    place = first_place[group_of_K[sorted_K]] + torch.arange(num_in) - first_input[group_of_K[sorted_K]]
    num_groups = int(groups_of.sum())
    order = torch.full((num_groups * GROUP,), -1, dtype=torch.int32)
    order[place] = sorted_K.int()
    codes = codes_NK.new_zeros(num_out, num_groups * GROUP)
    codes[:, place] = codes_NK[:, sorted_K]
    kept_order = unless_straight(order, num_in)
    share_of = torch.arange(scale.shape[1]).repeat_interleave(groups_of)
    codes = codes.view(num_out, num_groups, GROUP)
    if zero_NS is None:
        return Quantized(codes, scale[:, share_of, None], None, bits, Scales.F16, num_in, 0, kept_order)
    factors = torch.stack([torch.ones_like(zero_NS), zero_NS], -1).to(torch.uint8)[:, share_of]
    shared = int(math.log2(int(groups_of[0]))) if _is_even(groups_of) else 0
    scale = scale[:, share_of[:: 1 << shared], None].expand(-1, -1, 2)
    return Quantized(codes, scale, factors, bits, Scales.U8_MIN, num_in, shared, kept_order)


def _is_even(groups_of: Tensor) -> bool:
    """Whether all scales but the last have the same power of two of groups."""
    first = int(groups_of[0])
    return first.bit_count() == 1 and bool((groups_of[:-1] == first).all()) and int(groups_of[-1]) <= first
