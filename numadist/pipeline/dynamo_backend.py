"""`torch.compile(model, backend="numadist")`: the same passes behind torch's own door.

Dynamo hands over its graph with the parameters as inputs. They become parameters of a module again, which is sharded
as any other and compiled by Inductor. The full weights stay alive in the caller's model: to hold only local bytes,
use `numadist.shard`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.pipeline.shard import shard


class _WithParameters(torch.nn.Module):
    """Dynamo's graph with its parameter inputs bound; called with the remaining inputs."""

    def __init__(self, gm: GraphModule, args: tuple[Any, ...]):
        super().__init__()
        self.gm = gm
        self.names: list[str | None] = []
        for node, arg in zip(_placeholders(gm), args, strict=True):
            name = node.name if isinstance(arg, torch.nn.Parameter) else None
            self.names.append(name)
            if name is not None:
                self.register_parameter(name, arg)

    def forward(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        return self.gm(*(next(rest) if name is None else getattr(self, name) for name in self.names))


def _placeholders(gm: GraphModule) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def numadist(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Dynamo backend: shards the graph at its first call, and again for every new combination of sizes.

    Every rank must call with the same sizes in the same order. Raises: ShardError without a process group.
    """
    if not dist.is_initialized():
        raise ShardError(
            "backend 'numadist' needs a process group: call torch.distributed.init_process_group('numa') first"
        )
    ready: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        inputs = tuple(a for a in args if not isinstance(a, torch.nn.Parameter))
        key = tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in inputs)
        if key not in ready:
            ready[key] = shard(_WithParameters(gm, args).eval(), inputs, compile=True)
        return ready[key](*inputs)

    return run
