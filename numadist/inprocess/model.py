"""A model split over the nodes of one process."""

from collections.abc import Callable
from typing import Any

import torch

from numadist.errors import ShardError
from numadist.graph.modes import graph_draws_numbers
from numadist.inprocess.exchange import Exchange
from numadist.inprocess.thread_groups import Place, ThreadGroups, places_of
from numadist.log import get_logger
from numadist.memory.tensors import empty
from numadist.pipeline.stages import LocalModel, Site, capture, copy_of, localize
from numadist.sharding.build_schema import build_schema
from numadist.sharding.reasons import warn_left_alone
from numadist.topology.sysfs import read_machine

log = get_logger(__name__)


class InProcessModel(torch.nn.Module):
    """Called as the original is. `local[i]` is the graph of thread group i, its weights on that group's node."""

    def __init__(self, parts: list[LocalModel], groups: ThreadGroups, exchange: Exchange):
        super().__init__()
        if graph_draws_numbers(parts[0].gm):
            raise ShardError(
                f"{parts[0].name} draws random numbers, on every thread others; call model.eval() first"
            )
        self.local = torch.nn.ModuleList(part.gm for part in parts)
        self.schema = parts[0].schema
        self._parts, self._groups, self._exchange = parts, groups, exchange
        self._run: list[Callable[..., Any]] = [part.gm for part in parts]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**self._parts[0].constants, **kwargs}
        return self._groups.run(lambda i: self._run[i](*args, **kwargs))[0]

    def compile_local(self) -> None:
        """Compile every group's graph, one after the other: Dynamo compiles in one thread at a time anyway."""
        self._run = [part.compile() for part in self._parts]

    def close(self) -> None:
        """End the threads; the model cannot be called afterwards."""
        self._groups.close()


def shard(
    model: torch.nn.Module,
    example_inputs: Any,
    *,
    nodes: int | None = None,
    dynamic_shapes: Any = None,
    compile: bool = False,
) -> InProcessModel:
    """Split a model over the NUMA nodes of this machine, inside this process.

    nodes: how many thread groups; default one a NUMA node. On a machine with one node it cuts the cores.
    The other arguments are those of numadist.shard. Raises: ShardError, PlacementError.
    """
    places = places_of(read_machine(), nodes)
    captured = capture(model, example_inputs, dynamic_shapes)
    schema = build_schema(captured, len(places))
    warn_left_alone(schema)
    groups, exchange = ThreadGroups(places), Exchange(len(places))
    copies = [copy_of(captured) for _ in places]

    def localized(i: int) -> LocalModel:
        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return _allocate(places[i], shape, dtype)

        return localize(copies[i], schema, Site(i, exchange.emitter(i), allocate))

    result = InProcessModel(groups.run(localized), groups, exchange)
    if compile:
        result.compile_local()
    log.info("split over %d thread groups in this process, %d blocks", len(places), len(schema.blocks))
    return result


def _allocate(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.empty(shape, dtype=dtype) if place.node is None else empty(shape, dtype, numa_node=place.node)
    )
