"""Whole tensors of a sharded model's parts, and parts of whole tensors: for files, and for norms over all ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from numadist.errors import ShardError
from numadist.sharding.placement import Cut, Shard, indices_of
from numadist.weights.slices import local_slice


def whole_shape(shard: Shard, local: Iterable[int]) -> tuple[int, ...]:
    """Shape of the tensor that ranks hold parts of."""
    ends = {dim: max(stop for cut in s.cuts for _, stop in cut) for dim, s in shard.dims.items()}
    return tuple(ends.get(dim, size) for dim, size in enumerate(local))


def counted_here(shard: Shard, rank: int) -> dict[int, Tensor]:
    """Dim -> places in this rank's part that no lower rank holds: every element is counted on one rank."""
    return {dim: _first_holder(s.cuts, rank) for dim, s in shard.dims.items()}


def _first_holder(cuts: tuple[Cut, ...], rank: int) -> Tensor:
    lower = {i for cut in cuts[:rank] for i in indices_of(cut)}
    return torch.tensor(
        [place for place, i in enumerate(indices_of(cuts[rank])) if i not in lower], dtype=torch.int64
    )


def only_counted(t: Tensor, shard: Shard, rank: int) -> Tensor:
    """What of this rank's part is counted here; a copy if that is not all."""
    for dim, places in counted_here(shard, rank).items():
        if len(places) < t.shape[dim]:
            t = t.index_select(dim, places)
    return t


def gather_whole(local: Tensor, shard: Shard, rank: int, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor on every rank, bit by bit what the ranks hold. Collective.

    Ranks that hold the same element have the same value; the lowest one's is taken.
    """
    if not shard:
        return local.detach().clone()
    part = local.detach()
    where = [slice(None)] * part.dim()
    whole = part.new_zeros(whole_shape(shard, part.shape))
    for dim, s in shard.dims.items():
        places = counted_here(shard, rank)[dim]
        part = part.index_select(dim, places)
        where[dim] = torch.tensor(indices_of(s.cuts[rank]), dtype=torch.int64)[places]  # type: ignore[call-overload]
    if part.numel():
        whole[_outer(where)] = part
    # All but one summand are zero, so the sum has the value's bits; as integers, so that a -0.0 keeps its sign.
    bits = whole.view(torch.uint8) if whole.element_size() > 0 and whole.is_contiguous() else whole
    dist.all_reduce(bits, op=dist.ReduceOp.SUM, group=group)
    return whole


def _outer(where: list[Any]) -> tuple[Any, ...]:
    """Indices that pick the product of several dims' places."""
    several = [dim for dim, w in enumerate(where) if isinstance(w, Tensor)]
    if len(several) < 2:
        return tuple(where)
    grids = torch.meshgrid(*(where[dim] for dim in several), indexing="ij")
    picked = list(where)
    for dim, grid in zip(several, grids, strict=True):
        picked[dim] = grid
    return tuple(picked)


def part_of(whole: Tensor, name: str, shard: Shard, rank: int, local_shape: torch.Size) -> Tensor:
    """This rank's part of a whole tensor. Raises: ShardError for a tensor of another shape."""
    wanted = whole_shape(shard, local_shape)
    if tuple(whole.shape) != wanted:
        raise ShardError(
            f"{name} has shape {tuple(whole.shape)}, the whole tensor has {wanted}: a sharded model's state_dict has "
            "whole tensors, under the names of the unsharded model"
        )
    return local_slice(whole, shard, rank).clone()


def shards_of(names: Iterable[str], shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Placement of each parameter; an empty one where it is whole on every rank."""
    return {name: shards.get(name, Shard({})) for name in names}
