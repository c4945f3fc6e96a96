"""One rank of the variants that shard the model. Rank 0 talks to the harness and tells the others what to run."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from numadist import models
from numadist.compare.variants import Variant
from numadist.compare.worker import connect, serve, timed
from numadist.memory.local import local_empty
from numadist.shard.api import ShardedModel, shard
from numadist.shard.apply import apply
from numadist.shard.blocks import build_schema
from numadist.shard.capture import capture
from numadist.shard.load import localize_parameters
from numadist.shard.reduce import Emitter


def serve_rank(address: str, variant: Variant, model: str, dtype: str) -> None:
    """Run until the harness hangs up."""
    dist.init_process_group(variant.backend)
    rank = Rank(variant, model, getattr(torch, dtype))
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            pipe = stack.enter_context(connect(address))
            serve(pipe, rank.lead)
            rank.lead(None, 0)
        else:
            rank.follow()
    dist.destroy_process_group()


class Rank:
    """The model of one rank, sharded anew for every shape: graphs are made for one shape each."""

    def __init__(self, variant: Variant, model: str, dtype: torch.dtype):
        self.variant, self.model, self.dtype = variant, model, dtype
        self.sharded: dict[tuple[int, ...], torch.nn.Module] = {}

    def lead(self, input_ids: np.ndarray | None, times: int) -> Any:
        """Rank 0: have all ranks run one request; None ends them."""
        dist.broadcast_object_list([input_ids, times], src=0)
        return None if input_ids is None else self.forward(input_ids, times)

    def follow(self) -> None:
        while True:
            request: list[Any] = [None, 0]
            dist.broadcast_object_list(request, src=0)
            if request[0] is None:
                return
            self.forward(*request)

    def forward(self, input_ids: np.ndarray, times: int) -> tuple[list[float], np.ndarray, float, float]:
        inputs = {"input_ids": torch.from_numpy(input_ids), "use_cache": False, "logits_to_keep": 1}
        run = self.sharded.get(input_ids.shape) or self.shard(input_ids.shape, inputs)
        return *timed(run, input_ids, times, self.meet), *self.spent()

    def meet(self) -> None:
        """Start together, with the counters at zero."""
        dist.barrier()
        self.spent(reset=True)

    def spent(self, reset: bool = False) -> tuple[float, float]:
        """Seconds in all-reduces and, of them, waiting; Gloo does not count them."""
        if self.variant.backend != "numa":
            return 0.0, 0.0
        from numadist.comm.process_group import stats

        counted = stats(reset=reset)
        return counted.total_ns / 1e9, counted.wait_ns / 1e9

    def shard(self, shape: tuple[int, ...], inputs: dict[str, Any]) -> torch.nn.Module:
        model = models.build(self.model, self.dtype)
        if self.variant.reduce:
            made: torch.nn.Module = shard(model, inputs, compile=True)
        else:
            made = shard_without_sums(model, inputs)
        self.sharded[shape] = made
        return made


def shard_without_sums(model: torch.nn.Module, inputs: dict[str, Any]) -> ShardedModel:
    """The rank's graph with every collective left out: wrong results in the time communication cannot beat."""
    gm = capture(model, (), inputs)
    schema, num_ranks = build_schema(gm, dist.get_world_size()), dist.get_world_size()
    cat = torch.ops.aten.cat.default
    nothing = Emitter(
        all_reduce=lambda g, x: x,
        all_gather=lambda g, x: g.call_function(cat, ([x] * num_ranks,)),
    )
    apply(gm, schema, dist.get_rank(), nothing)
    localize_parameters(gm, schema, dist.get_rank(), local_empty)
    sharded = ShardedModel(gm, schema, dist.get_rank(), {})
    sharded.compile_local(options={"freezing": True})
    return sharded
