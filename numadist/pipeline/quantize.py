"""Give a rank's graph codes instead of weights: those of its file, or rounded while they are loaded."""

from collections import Counter
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.graph.cleanup import drop_unused_parameters
from numadist.kernels.quantized import GROUP, Packed, Quantized, kernel_name, pack, quantize
from numadist.log import get_logger
from numadist.lowering.quantized import CodedWeight, coded_weights, routers, use_codes
from numadist.progress import progress
from numadist.sharding.placement import Cut, Shard
from numadist.sharding.schema import CodedWeights, Schema
from numadist.weights.fake import is_fake
from numadist.weights.load import Allocate, WeightsFile
from numadist.weights.slices import local_slice

log = get_logger(__name__)
aten = torch.ops.aten

# auto: what the file has as codes stays codes. int8, int4: all layers and tables become codes of so many bits, but for
# tables and the head of int4, which have 8, and routers of mixtures, which stay as they are.
Quantization = Literal["auto", "int8", "int4"]
_ALL = "auto", "int8", "int4"
_BITS = {"int8": 8, "int4": 4}


def check_quantization(given: object, train: bool = False) -> None:
    """Raises: ShardError for what is neither None nor a Quantization, or for one of them in training."""
    if given not in (None, *_ALL):
        raise ShardError(f"quantization must be auto, int8, int4 or None, got {given!r}")
    if given is not None and train:
        raise ShardError("codes do not learn: leave quantization away, or train")


def quantize_parameters(
    gm: GraphModule,
    schema: Schema,
    rank: int,
    allocate: Allocate,
    file: WeightsFile | None,
    how: Quantization,
) -> None:
    """Replace what can be codes by this rank's part of them. Other parameters stay as they are, to be loaded.

    Raises: ShardError for a damaged file.
    """
    shards = schema.param_shards()
    found: Counter[str] = Counter()
    weights = _weights(gm, how)
    bits = _bits_of(gm, weights, how)
    with progress("loading codes", sum(w.parameter.numel() for w in weights) / 1e6, "million") as advance:
        for number, weight in enumerate(weights):
            shard = next((shards[n] for n in weight.names if n in shards), Shard({}))
            codes = codes_of(weight, shard, rank, file, bits.get(number))
            advance(weight.parameter.numel() / 1e6)
            if codes is None:
                continue
            use_codes(gm, weight, _moved(pack(codes, weight.num_experts), allocate), number)
            found[codes.layout] += 1
    if found:
        gm.graph.eliminate_dead_code()
        drop_unused_parameters(gm)
        gm.recompile()
        kinds = "; ".join(f"{count} of {kind}" for kind, count in sorted(found.items()))
        log.info("weights that stay codes: %s (%s)", kinds, kernel_name())
    if rank == 0 and file is not None and how == "auto":
        _warn_of_widened(gm, file)


def _weights(gm: GraphModule, how: Quantization) -> list[CodedWeight]:
    """What could be codes. Of routers only a file's own are."""
    plain = set() if how == "auto" else routers(gm)
    return [w for w in coded_weights(gm) if not any(user in plain for user, _, _ in w.users)]


def _bits_of(gm: GraphModule, weights: list[CodedWeight], how: Quantization) -> dict[int, int]:
    """Of each weight that is rounded. Tables and the head, the last layer, get 8: at 4 they cost more than all else."""
    if how == "auto":
        return {}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    users = [[user for user, _, _ in weight.users] for weight in weights]
    last = max((user for some in users for user in some), key=order.__getitem__, default=None)
    sensitive = [any(u is last or u.target is aten.embedding.default for u in some) for some in users]
    return {i: 8 if is_sensitive else _BITS[how] for i, is_sensitive in enumerate(sensitive)}


def planned_codes(gm: GraphModule, file: WeightsFile | None, how: Quantization) -> dict[str, CodedWeights]:
    """What parameters of a captured graph become, by all their names; of a file one output each is read."""
    found: dict[str, CodedWeights] = {}
    weights = _weights(gm, how)
    bits = _bits_of(gm, weights, how)
    for number, weight in enumerate(weights):
        codes = None
        if how == "auto":
            codes = _read(weight, file, ((0, 1),))
        elif weight.parameter.shape[weight.in_dim] >= GROUP:
            codes = quantize(torch.ones(1, GROUP), bits[number])
        if codes is not None:
            found |= dict.fromkeys(weight.names, CodedWeights(codes.layout, codes.bytes_per_weight))
    return found


def _moved(packed: Packed, allocate: Allocate) -> Packed:
    """The same in fresh memory of this rank's."""

    def fresh(t: Tensor) -> Tensor:
        return allocate(tuple(t.shape), t.dtype).copy_(t)

    order = None if packed.order is None else fresh(packed.order)
    return replace(packed, codes=fresh(packed.codes), scales=fresh(packed.scales), order=order)


def _warn_of_widened(gm: GraphModule, file: WeightsFile) -> None:
    """One warning for all tensors of the file that are codes there and plain numbers here."""
    widened = []
    for name, parameter in gm.named_parameters():
        found = file.checkpoint.find(file.names([name]))
        if found is not None and is_fake(parameter) and file.checkpoint.has_codes(found):
            widened.append((parameter.numel() * parameter.element_size(), name))
    if widened:
        widened.sort(reverse=True)
        total = sum(num_bytes for num_bytes, _ in widened)
        log.warning(
            "%d quantized tensors are widened to %.0f MB over all ranks, as no layout of ours holds them: %s%s",
            len(widened),
            total / 1e6,
            ", ".join(name for _, name in widened[:3]),
            " ..." if len(widened) > 3 else "",
        )


def codes_of(
    weight: CodedWeight, shard: Shard, rank: int, file: WeightsFile | None, bits: int | None
) -> Quantized | None:
    """This rank's part of a weight as codes [N, ...] of so many bits, or as in the file; None where it has none.

    Of a stack of experts all, one behind the other.
    """
    size = weight.parameter.shape[weight.in_dim]
    ranges = shard.dims[weight.in_dim].cuts[rank] if weight.in_dim in shard.dims else ((0, size),)
    outputs = Shard({dim: cut for dim, cut in shard.dims.items() if dim == weight.out_dim})
    if sum(stop - start for start, stop in ranges) == 0 or 0 in outputs.local_shape(
        weight.parameter.shape, rank
    ):
        return None
    if bits is None:
        whole = _of_file(weight, outputs, rank, file)
    elif size < GROUP:
        return None
    else:
        whole = _rounded(weight, outputs, rank, file, bits)
    if whole is None or tuple(ranges) == ((0, size),):
        return whole
    return whole.inputs(ranges)


def _of_file(weight: CodedWeight, outputs: Shard, rank: int, file: WeightsFile | None) -> Quantized | None:
    shape = weight.parameter.shape
    rows = None
    if outputs.dims:
        starts = range(0, weight.num_experts * shape[weight.out_dim], shape[weight.out_dim])
        cut = outputs.dims[weight.out_dim].cuts[rank]
        rows = tuple((first + start, first + stop) for first in starts for start, stop in cut)
    return _read(weight, file, rows)


def _read(weight: CodedWeight, file: WeightsFile | None, rows: Cut | None) -> Quantized | None:
    """Some outputs as the file's codes; None where they come from elsewhere, or the file has numbers."""
    name = None if file is None else file.checkpoint.find(file.names(weight.names))
    if file is None or name is None or not is_fake(weight.parameter):
        return None
    return file.checkpoint.read_codes(name, tuple(weight.parameter.shape), weight.is_transposed, rows)


def _rounded(
    weight: CodedWeight, outputs: Shard, rank: int, file: WeightsFile | None, bits: int
) -> Quantized | None:
    """None, and a warning, for a weight that has no codes; it stays as it is."""
    plain = _plain(weight, outputs, rank, file)
    if plain is None:
        return None
    try:
        return quantize(plain, bits)
    except ValueError as reason:
        log.warning("%s stays as it is: %s", weight.names[0], reason)
        return None


def _plain(weight: CodedWeight, outputs: Shard, rank: int, file: WeightsFile | None) -> Tensor | None:
    """All inputs of this rank's outputs [N, K] in f32, so that groups are the same on any number of ranks."""
    parameter = weight.parameter
    if not is_fake(parameter):
        plain = local_slice(parameter.detach(), outputs, rank).float()
    elif file is None:
        return None  # whoever loads parameters says what is wrong
    else:
        plain = torch.empty(outputs.local_shape(parameter.shape, rank))
        file.checkpoint.read_into(plain, file.checkpoint.found(file.names(weight.names)), outputs, rank)
    if weight.is_transposed:
        plain = plain.transpose(-1, -2)
    return plain.reshape(-1, plain.shape[-1])
