"""The ranks that generate together: how they talk, whatever they run in."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from numadist.pipeline.shard import check_alike
from numadist.sharding.collectives import Emitter, emitter_of
from numadist.sharding.schema import Schema


@dataclass(frozen=True)
class Peers:
    """One rank's view of the ranks that generate together, and how it talks to them."""

    rank: int
    num_ranks: int
    emitter: Emitter | None  # collectives inside the graph; None: one rank needs none
    all_gather: Callable[[Tensor], Tensor]  # [N] of each rank -> [num_ranks, N]
    broadcast: Callable[[Tensor], None]  # rank 0's tensor into everybody's
    check: Callable[[Schema], None]  # raises on every rank if plans differ


def alone() -> Peers:
    """One process without a group."""
    return Peers(0, 1, None, lambda x: x[None], lambda x: None, lambda schema: None)


def peers_of(group: dist.ProcessGroup | None) -> Peers:
    """The ranks of `group`, by default of the whole job; one rank where torch.distributed is not initialized."""
    if not dist.is_initialized():
        return alone()
    pg = group if group is not None else dist.group.WORLD
    assert pg is not None  # initialized
    rank, num_ranks = dist.get_rank(pg), dist.get_world_size(pg)
    if num_ranks == 1:
        return alone()

    def all_gather(x: Tensor) -> Tensor:
        out = torch.empty(num_ranks * x.numel(), dtype=x.dtype)
        dist.all_gather_single(out, x, group=pg)
        return out.view(num_ranks, x.numel())

    def broadcast(x: Tensor) -> None:
        dist.broadcast(x, group=pg, group_src=0)

    return Peers(
        rank, num_ranks, emitter_of(pg), all_gather, broadcast, lambda schema: check_alike(schema, pg)
    )


def local_heads(emitter: Emitter | None) -> Emitter | None:
    """The same collectives, with the logits of a split vocabulary left where they are."""
    return None if emitter is None else replace(emitter, gather_heads=False)
