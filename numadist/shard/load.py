"""Give a rank's graph its parameters: only this rank's slices, in memory of its node."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.shard.checkpoint import Checkpoint, local_slice
from numadist.shard.fake import is_fake
from numadist.shard.placement import Shard
from numadist.shard.schema import Schema

Allocate = Callable[
    [tuple[int, ...], torch.dtype], Tensor
]  # fresh contiguous memory on the node of this rank


def localize_parameters(
    gm: GraphModule,
    schema: Schema,
    rank: int,
    allocate: Allocate,
    checkpoint: Checkpoint | None = None,
    trainable: bool = False,
) -> None:
    """Replace every parameter of `gm` by this rank's part in fresh memory; tied names stay tied.

    Values come from the model itself or, for parameters without memory, from the checkpoint. The module keeps no
    reference to the full weights: they are freed when the caller drops the original model.
    Raises: ShardError if a parameter is fake and the checkpoint lacks it.
    """
    shards, partial = schema.param_shards(), schema.partial_params()
    names_of: dict[int, list[str]] = {}
    full_params = dict(gm.named_parameters(remove_duplicate=False))
    for name, param in full_params.items():
        names_of.setdefault(id(param), []).append(name)
    for names in names_of.values():
        full: Tensor = full_params[names[0]].detach()
        shard = next((shards[n] for n in names if n in shards), Shard({}))
        local = allocate(shard.local_shape(full.shape, rank), full.dtype)
        if rank != 0 and any(n in partial for n in names):
            local.zero_()
        elif checkpoint is not None and is_fake(full_params[names[0]]):
            checkpoint.read_into(local, checkpoint.find(_all_names(gm, names)), shard, rank)
        elif is_fake(full_params[names[0]]):
            raise ShardError(f"parameter {names[0]} has no memory; pass weights=FOLDER to numadist.shard")
        else:
            local.copy_(local_slice(full, shard, rank))
        # Of a partial parameter only rank 0's copy may learn, or its sum would move once per rank.
        learns = trainable and (rank == 0 or not any(n in partial for n in names))
        parameter = torch.nn.Parameter(local, requires_grad=learns)
        for name in names:
            _set(gm, name, parameter)
    for name, buffer in list(gm.named_buffers(remove_duplicate=False)):
        copy = allocate(tuple(buffer.shape), buffer.dtype)
        _set(gm, name, copy.copy_(buffer))


def _all_names(gm: GraphModule, names: list[str]) -> list[str]:
    """The parameter's own names and those it is tied to in the original model."""
    ties: dict[str, list[str]] = gm.meta.get("tied_names", {})
    return [*names, *(t for n in names for t in ties.get(n, []))]


def _set(gm: GraphModule, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(gm.get_submodule(owner), leaf, value)
