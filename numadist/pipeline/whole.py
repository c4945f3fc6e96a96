"""Whole tensors of a sharded model's parts, and parts of whole tensors: for files, and for norms over all ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from numadist.errors import ShardError
from numadist.sharding.placement import Cut, Shard, indices_of, overlaps
from numadist.weights.slices import local_slice


def whole_shape(shard: Shard, local: Iterable[int]) -> tuple[int, ...]:
    """Shape of the tensor that ranks hold parts of."""
    return tuple(shard.dims[dim].size if dim in shard.dims else size for dim, size in enumerate(local))


def _first_holder(cuts: tuple[Cut, ...], rank: int) -> Tensor:
    """Places in this rank's part that no lower rank holds: every element is counted on one rank."""
    lower = {i for cut in cuts[:rank] for i in indices_of(cut)}
    return torch.tensor(
        [place for place, i in enumerate(indices_of(cuts[rank])) if i not in lower], dtype=torch.int64
    )


def only_counted(t: Tensor, shard: Shard, rank: int) -> Tensor:
    """What of this rank's part is counted here; a copy if that is not all."""
    for dim, s in shard.dims.items():
        if overlaps(s.cuts):
            t = t.index_select(dim, _first_holder(s.cuts, rank))
    return t


def gather_whole(local: Tensor, shard: Shard, rank: int, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor on every rank, bit by bit what the ranks hold. Collective.

    Ranks that hold the same element have the same value; the lowest one's is taken.
    """
    if not shard:
        return local.detach().clone()
    whole = local.detach()
    for dim, s in shard.dims.items():
        places = _first_holder(s.cuts, rank)
        index = torch.tensor(indices_of(s.cuts[rank]), dtype=torch.int64)[places]
        part = whole.index_select(dim, places)
        whole = part.new_zeros((*part.shape[:dim], s.size, *part.shape[dim + 1 :])).index_copy_(
            dim, index, part
        )
    # All but one summand are zero, so the sum has the value's bits; as integers, so that a -0.0 keeps its sign.
    dist.all_reduce(whole.view(torch.uint8), op=dist.ReduceOp.SUM, group=group)
    return whole


def part_of(whole: Tensor, name: str, shard: Shard, rank: int, local_shape: torch.Size) -> Tensor:
    """This rank's part of a whole tensor. Raises: ShardError for a tensor of another shape."""
    wanted = whole_shape(shard, local_shape)
    if tuple(whole.shape) != wanted:
        raise ShardError(
            f"{name} has shape {tuple(whole.shape)}, the whole tensor has {wanted}: a sharded model's state_dict has "
            "whole tensors, under the names of the unsharded model"
        )
    return local_slice(whole, shard, rank).clone()
