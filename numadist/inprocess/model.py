"""A model split over the nodes of one process."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from numadist.inprocess.exchange import Exchange
from numadist.inprocess.team import Place, Team, places_of
from numadist.log import get_logger
from numadist.memory.tensors import empty
from numadist.shard.api import warn_left_alone
from numadist.shard.apply import apply
from numadist.shard.blocks import build_schema
from numadist.shard.capture import as_args, capture
from numadist.shard.compiled import compile_frozen
from numadist.shard.load import localize_parameters
from numadist.shard.schema import Schema
from numadist.topology.sysfs import read_machine

log = get_logger(__name__)


class InProcessModel(torch.nn.Module):
    """Called as the original is. `local[i]` is the graph of thread group i, its weights on that group's node."""

    def __init__(
        self,
        graphs: list[GraphModule],
        schema: Schema,
        team: Team,
        exchange: Exchange,
        constants: Mapping[str, Any],
    ):
        super().__init__()
        self.local = torch.nn.ModuleList(graphs)
        self.schema = schema
        self._team, self._exchange = team, exchange
        self._constants = dict(constants)
        self._run: list[Any] = list(graphs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**self._constants, **kwargs}
        return self._team.run(lambda i: self._run[i](*args, **kwargs))[0]

    def compile_local(self, one_shape: bool = False) -> None:
        """Compile every group's graph, one after the other: Dynamo compiles in one thread at a time anyway."""
        self._run = [compile_frozen(graph, one_shape=one_shape) for graph in self.local]

    def close(self) -> None:
        """End the threads; the model cannot be called afterwards."""
        self._team.close()


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
    args, kwargs = as_args(example_inputs)
    captured = capture(model, args, kwargs, dynamic_shapes)
    schema = build_schema(captured, len(places))
    warn_left_alone(schema)
    team, exchange = Team(places), Exchange(len(places))
    graphs = [copy.deepcopy(captured) for _ in places]

    def localize(i: int) -> None:
        apply(graphs[i], schema, i, exchange.emitter(i))
        localize_parameters(graphs[i], schema, i, lambda shape, dtype: _allocate(places[i], shape, dtype))

    team.run(localize)
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    result = InProcessModel(graphs, schema, team, exchange, constants)
    if compile:
        result.compile_local(one_shape=dynamic_shapes is None)
    log.info("split over %d thread groups in this process, %d blocks", len(places), len(schema.blocks))
    return result


def _allocate(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.empty(shape, dtype=dtype) if place.node is None else empty(shape, dtype, numa_node=place.node)
    )
