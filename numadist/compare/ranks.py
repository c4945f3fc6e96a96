"""One rank of the variants that shard the model. Rank 0 talks to the harness and tells the others what to run."""

from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.variants import Variant
from numadist.compare.worker_loop import OneShape, connect, serve, timed
from numadist.pipeline.plan import plan
from numadist.pipeline.shard import shard
from numadist.pipeline.sharded_model import ShardedModel
from numadist.pipeline.stages import Site, capture, localize
from numadist.sharding.build_schema import build_schema
from numadist.sharding.collectives import Emitter


def serve_rank(address: str, variant: Variant, subject: ModelUnderTest) -> None:
    """Run until the harness hangs up."""
    dist.init_process_group(variant.backend)
    rank = Rank(variant, subject)
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

    def __init__(self, variant: Variant, subject: ModelUnderTest):
        self.variant = variant
        self.shapes = OneShape(subject, self.shard, keeps_model=False)

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
        schema = None
        if self.variant.auto or self.variant.sequence:
            auto: Literal["auto"] | None = "auto" if self.variant.auto else None
            schema = plan(model, inputs, ranks=auto, blocks=auto, sequence_parallel=self.variant.sequence)
        return shard(model, inputs, schema=schema, compile=True)


def shard_without_sums(model: torch.nn.Module, inputs: dict[str, Any]) -> ShardedModel:
    """The rank's graph with every collective left out: wrong results in the time communication cannot beat."""
    captured, num_ranks = capture(model, inputs), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None  # initialized
    cat = torch.ops.aten.cat.default
    nothing = Emitter(
        all_reduce=lambda g, x: x,
        all_gather=lambda g, x: g.call_function(cat, ([x] * num_ranks,)),
    )
    schema = build_schema(captured, num_ranks)
    sharded = ShardedModel(localize(captured, schema, Site(dist.get_rank(), nothing)), world)
    sharded.compile_local()
    return sharded
