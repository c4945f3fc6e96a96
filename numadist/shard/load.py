"""Give a rank's graph its parameters: only this rank's slices, in memory of its node."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule

from numadist.shard.placement import Cut, Shard
from numadist.shard.schema import Schema

Copy = Callable[[Tensor], Tensor]  # fresh memory with the same values, on the node of this rank


def local_slice(full: Tensor, shard: Shard, rank: int) -> Tensor:
    """What `rank` holds of a parameter: views where the cut is one interval, else a concatenation."""
    part = full
    for dim, dim_shard in shard.dims.items():
        part = _take(part, dim, dim_shard.cuts[rank])
    return part


def _take(full: Tensor, dim: int, cut: Cut) -> Tensor:
    pieces = [full.narrow(dim, start, stop - start) for start, stop in cut or ((0, 0),)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def localize_parameters(gm: GraphModule, schema: Schema, rank: int, copy: Copy) -> None:
    """Replace every parameter of `gm` by this rank's part in fresh memory; tied names stay tied.

    The module keeps no reference to the full weights: they are freed when the caller drops the original model.
    """
    shards, partial = schema.param_shards(), schema.partial_params()
    made: dict[tuple[int, bool], torch.nn.Parameter] = {}
    for name, full in list(gm.named_parameters(remove_duplicate=False)):
        key = (id(full), name in shards)
        if key not in made:
            local = local_slice(full.detach(), shards.get(name, Shard({})), rank)
            if name in partial and rank != 0:
                local = torch.zeros_like(local)
            made[key] = torch.nn.Parameter(copy(local), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(gm.get_submodule(owner), leaf, made[key])
    for name, buffer in list(gm.named_buffers(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        setattr(gm.get_submodule(owner), leaf, copy(buffer))
