"""Give a rank's graph its parameters: only this rank's slices, in memory of its node."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.graph.query import set_tensor
from numadist.sharding.placement import Shard
from numadist.sharding.schema import Schema
from numadist.weights.checkpoint import Checkpoint
from numadist.weights.fake import is_fake
from numadist.weights.slices import local_slice

# Fresh contiguous memory on the node of this rank.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def localize_parameters(
    gm: GraphModule,
    schema: Schema,
    rank: int,
    allocate: Allocate,
    tied_names: Mapping[str, list[str]],
    checkpoint: Checkpoint | None = None,
    trainable: bool = False,
) -> None:
    """Replace every parameter of `gm` by this rank's part in fresh memory; tied names stay tied.

    tied_names: parameter name -> its other names in the model; a checkpoint has only one of them.
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
            checkpoint.read_into(
                local,
                checkpoint.find([*names, *(t for n in names for t in tied_names.get(n, []))]),
                shard,
                rank,
            )
        elif is_fake(full_params[names[0]]):
            raise ShardError(f"parameter {names[0]} has no memory; pass weights=FOLDER to numadist.shard")
        else:
            local.copy_(local_slice(full, shard, rank))
        # Of a partial parameter only rank 0's copy may learn, or its sum would move once per rank.
        learns = trainable and (rank == 0 or not any(n in partial for n in names))
        parameter = torch.nn.Parameter(local, requires_grad=learns)
        for name in names:
            set_tensor(gm, name, parameter)
    for name, buffer in list(gm.named_buffers(remove_duplicate=False)):
        copy = allocate(tuple(buffer.shape), buffer.dtype)
        set_tensor(gm, name, copy.copy_(buffer))
