"""Run all ranks of a sharded model in one process: one thread a rank, sums exchanged over a barrier.

The passes under test are the real ones; only the transport of the all-reduce is a Python list, so that planning and
rewriting can be tested for any number of ranks without a process group.
"""

import copy
import functools
import threading
from dataclasses import replace
from typing import Any

import torch

from numadist.graph.capture import as_args
from numadist.pipeline.stages import Site, capture, localize
from numadist.sharding.build_schema import build_schema
from numadist.sharding.collectives import Emitter
from numadist.sharding.schema import Schema
from numadist.sharding.sequence import plan_sequence

TIMEOUT_S = 300


class Board:
    """Collectives between the threads of one process, summed in rank order."""

    def __init__(self, num_ranks: int):
        self.values: list[Any] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=TIMEOUT_S)

    def _exchange(self, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        self.values[rank] = x
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def all_reduce(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return functools.reduce(torch.add, self._exchange(x, rank))

    def all_gather(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat(self._exchange(x, rank))

    def reduce_scatter(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        total = self.all_reduce(x, rank)
        assert len(total) % len(self.values) == 0, f"{len(total)} rows for {len(self.values)} ranks"
        return total.chunk(len(self.values))[rank]

    def emitter(self, rank: int) -> Emitter:
        return Emitter(
            all_reduce=lambda g, x: g.call_function(self.all_reduce, (x, rank)),
            all_gather=lambda g, x: g.call_function(self.all_gather, (x, rank)),
            reduce_scatter=lambda g, x: g.call_function(self.reduce_scatter, (x, rank)),
        )


def shard_all(
    model: torch.nn.Module,
    example_inputs: Any,
    num_ranks: int,
    dynamic_shapes: Any = None,
    schema=None,
    checkpoint=None,
    sequence_parallel: bool = False,
) -> tuple[Schema, list[torch.fx.GraphModule], Board]:
    """Every rank's graph of `model`."""
    board = Board(num_ranks)
    graphs = []
    captured = capture(model, example_inputs, dynamic_shapes)
    schema = schema or build_schema(captured, num_ranks)
    if sequence_parallel and schema.sequence is None:
        schema = replace(schema, sequence=plan_sequence(captured.gm, schema))
    for rank in range(num_ranks):
        site = Site(rank, board.emitter(rank), lambda shape, dtype: torch.empty(shape, dtype=dtype))
        graphs.append(localize(copy.deepcopy(captured), schema, site, checkpoint).gm)
    return schema, graphs, board


def run_all(graphs: list[torch.fx.GraphModule], inputs: Any, board: Board) -> list[Any]:
    """Every rank's output. An error in one rank is raised here."""
    args, kwargs = as_args(inputs)
    outputs: list[Any] = [None] * len(graphs)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                outputs[rank] = graphs[rank](*args, **kwargs)
        except BaseException as e:
            errors.append(e)
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(graphs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return outputs


def local_fraction(graphs: list[torch.fx.GraphModule], model: torch.nn.Module) -> float:
    """Largest rank's share of the model's parameter elements."""
    total = sum(p.numel() for p in model.parameters())
    return max(sum(p.numel() for p in gm.parameters()) for gm in graphs) / total
