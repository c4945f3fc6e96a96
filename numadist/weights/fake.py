"""Build a model without memory for its weights: parameters are fake, buffers (rotary tables, masks) are real."""

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules made inside get parameters that have a shape and a dtype but no memory and no initialisation.

    For `numadist.shard(model, ..., weights=folder)`, which then reads only this rank's slices. torch.device("meta")
    would lose the buffers too, which no checkpoint has.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    register = torch.nn.Module.register_parameter

    def register_fake(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not isinstance(param, FakeTensor):
            with mode:
                fake = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
            param = torch.nn.Parameter(fake, requires_grad=param.requires_grad)
        register(module, name, param)

    torch.nn.Module.register_parameter = register_fake  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_fake(t: torch.Tensor) -> bool:
    return isinstance(t, FakeTensor)
