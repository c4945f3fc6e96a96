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
from torch.utils._pytree import tree_map_only

from numadist.errors import ShardError
from numadist.log import get_logger
from numadist.pipeline.shard import shard

log = get_logger(__name__)


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


class _WithoutBackward(torch.autograd.Function):
    """Ties an output to what it would have a gradient for, so that backward() says why there is none."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ShardError(
            "torch.compile(backend='numadist') is for inference and has no backward: "
            "train what numadist.shard(model, inputs, train=True) returns"
        )


def numadist(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Dynamo backend: shards the graph at its first call, for every new combination of sizes and for changed weights.

    Every rank must call with the same sizes in the same order, and change its weights alike. A change made through
    `.data` in place is unknown to torch and to this backend: call torch.compiler.reset() after one.
    Raises: ShardError without a process group, and in backward().
    """
    if not dist.is_initialized():
        raise ShardError(
            "backend 'numadist' needs a process group: call torch.distributed.init_process_group('numa') first"
        )
    ready: dict[tuple[Any, ...], Callable[..., Any]] = {}
    weights: list[tuple[int, ...]] = []

    def run(*args: Any) -> Any:
        now = [_version(a) for a in args if isinstance(a, torch.nn.Parameter)]
        if now != weights:
            if ready:
                log.info("weights have changed since the last call: the model is sharded again")
            ready.clear()
            weights[:] = now
        inputs = tuple(a for a in args if not isinstance(a, torch.nn.Parameter))
        key = tuple((*a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in inputs)
        if key not in ready:
            ready[key] = shard(_WithParameters(gm, args).eval(), inputs, compile=True)
        outputs = ready[key](*inputs)
        learns = next((a for a in args if isinstance(a, torch.Tensor) and a.requires_grad), None)
        return outputs if learns is None or not torch.is_grad_enabled() else _refuse_backward(outputs, learns)

    return run


def _version(weight: torch.Tensor) -> tuple[int, ...]:
    """Another one after every change that torch knows of."""
    changes = 0 if weight.is_inference() else weight._version
    return id(weight), weight.data_ptr(), changes


def _refuse_backward(outputs: Any, anchor: torch.Tensor) -> Any:
    return tree_map_only(
        torch.Tensor,
        lambda t: _WithoutBackward.apply(anchor, t) if t.is_floating_point() else t,  # type: ignore[no-untyped-call]
        outputs,
    )
