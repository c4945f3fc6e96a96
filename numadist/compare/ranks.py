"""One rank of the variants that shard the model. Rank 0 talks to the harness and tells the others what to run."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from numadist.compare.variants import Variant
from numadist.compare.worker import Job, OneShape, connect, serve, timed
from numadist.memory.local import local_empty
from numadist.shard.api import ShardedModel, shard
from numadist.shard.apply import apply
from numadist.shard.blocks import build_schema
from numadist.shard.capture import capture
from numadist.shard.load import localize_parameters
from numadist.shard.reduce import Emitter


def serve_rank(address: str, variant: Variant, job: Job) -> None:
    """Run until the harness hangs up."""
    dist.init_process_group(variant.backend)
    rank = Rank(variant, job)
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            pipe = stack.enter_context(connect(address))
            serve(pipe, rank.lead)
            rank.end()
        else:
            rank.follow()
    dist.destroy_process_group()


class Rank:
    """The model of one rank, sharded anew for every shape: graphs are made for one shape each."""

    def __init__(self, variant: Variant, job: Job):
        self.variant = variant
        self.shapes = OneShape(job, self.shard, keeps_model=False)

    def lead(self, *request: Any) -> Any:
        """Rank 0: have all ranks run one request, as Worker.forward takes it."""
        dist.broadcast_object_list([request], src=0)
        return self.forward(*request)

    def end(self) -> None:
        """Rank 0: no more requests."""
        dist.broadcast_object_list([None], src=0)

    def follow(self) -> None:
        while True:
            request: list[Any] = [None]
            dist.broadcast_object_list(request, src=0)
            if request[0] is None:
                return
            self.forward(*request[0])

    def forward(
        self, batch: int, seq: int, times: int, input_ids: np.ndarray | None
    ) -> tuple[list[float], np.ndarray, float, float]:
        return *timed(*self.shapes(batch, seq, input_ids), times, self.meet), *self.spent()

    def meet(self) -> None:
        """Start together, with the counters at zero."""
        dist.barrier()
        self.spent(reset=True)

    def spent(self, reset: bool = False) -> tuple[float, float]:
        """Seconds in all-reduces and, of them, waiting; Gloo does not count them."""
        if self.variant.backend != "numa":
            return 0.0, 0.0
        from numadist.comm.registry import stats

        counted = stats(reset=reset)
        return counted.total_ns / 1e9, counted.wait_ns / 1e9

    def shard(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.nn.Module:
        if not self.variant.reduce:
            return shard_without_sums(model, inputs)
        choice = "auto" if self.variant.auto else None
        sequence = self.variant.sequence
        return shard(model, inputs, compile=True, ranks=choice, blocks=choice, sequence_parallel=sequence)


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
    sharded.compile_local(one_shape=True)
    return sharded
