"""Give a rank's graph its parameters: only this rank's slices, in memory of its node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.graph.query import set_tensor
from numadist.graph.tied import named_once
from numadist.progress import progress
from numadist.sharding.placement import Shard
from numadist.sharding.schema import Schema
from numadist.weights.checkpoint import Checkpoint
from numadist.weights.fake import is_fake
from numadist.weights.formats import open_checkpoint
from numadist.weights.slices import local_slice

# Fresh contiguous memory on the node of this rank.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class WeightsFile:
    """Where values of parameters without memory come from, and of buffers that checkpoints have.

    tied_names: parameter name -> its other names in the model; a checkpoint has only one of them.
    """

    checkpoint: Checkpoint
    tied_names: Mapping[str, list[str]]
    persistent_buffers: frozenset[str]

    def names(self, own: Sequence[str]) -> list[str]:
        """All that the file may call a parameter of these names."""
        return [*own, *(tied for name in own for tied in self.tied_names.get(name, []))]


def localize_parameters(
    gm: GraphModule,
    schema: Schema,
    rank: int,
    allocate: Allocate,
    file: WeightsFile | None = None,
    train: bool = False,
) -> None:
    """Replace every parameter of `gm` by this rank's part in fresh memory; tied names stay tied.

    Values come from the model itself or, for parameters without memory, from the file. The module keeps no
    reference to the full weights: they are freed when the caller drops the original model.
    train: parameters that learn in the model learn here; otherwise none does.
    Raises: ShardError if a parameter has no memory and the file lacks it.
    """
    shards, partial = schema.param_shards(), schema.partial_params()
    parameters = named_once(gm)
    is_empty = False
    with progress("loading weights", sum(_megabytes(full) for _, full in parameters), "MB") as advance:
        for names, full in parameters:
            shard = next((shards[n] for n in names if n in shards), Shard({}))
            local = allocate(shard.local_shape(full.shape, rank), full.dtype)
            is_empty |= is_fake(full)
            if not train and rank != 0 and any(n in partial for n in names):
                local.zero_()
            elif not is_fake(full):
                local.copy_(local_slice(full.detach(), shard, rank))
            elif file is None:
                raise ShardError(f"parameter {names[0]} has no memory; pass weights=FOLDER to numadist.shard")
            else:
                file.checkpoint.read_into(local, file.checkpoint.found(file.names(names)), shard, rank)
            parameter = torch.nn.Parameter(local, requires_grad=train and full.requires_grad)
            for name in names:
                set_tensor(gm, name, parameter)
            advance(_megabytes(full))
    _localize_buffers(gm, allocate, file if is_empty else None)


def _megabytes(t: Tensor) -> float:
    return t.numel() * t.element_size() / 1e6


def _localize_buffers(gm: GraphModule, allocate: Allocate, file: WeightsFile | None) -> None:
    """Copy buffers whole; those that checkpoints have are read from the file, if it has them."""
    copies: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # an id is taken again once its tensor is gone
    for name, buffer in list(gm.named_buffers(remove_duplicate=False)):
        if id(buffer) not in copies:
            kept.append(buffer)
            copies[id(buffer)] = copy = allocate(tuple(buffer.shape), buffer.dtype)
            found = file.checkpoint.find([name]) if file and name in file.persistent_buffers else None
            if file is not None and found is not None:
                file.checkpoint.read_into(copy, found, Shard({}), 0)
            else:
                copy.copy_(buffer)
        set_tensor(gm, name, copies[id(buffer)])


def load_whole(model: torch.nn.Module, path: str | Path) -> None:
    """Give a model without memory for its parameters all of them from a checkpoint; tied ones stay tied."""
    checkpoint = open_checkpoint(path, model)
    for names, fake in named_once(model):
        real = torch.empty(fake.shape, dtype=fake.dtype)
        checkpoint.read_into(real, checkpoint.found(names), Shard({}), 0)
        parameter = torch.nn.Parameter(real, requires_grad=fake.requires_grad)
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)
