"""From an unmodified model to one exported graph, with its call signature and parameter names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from numadist.errors import ShardError


@dataclass
class CapturedModel:
    """A model as one graph, before it is cut for a rank.

    gm: torch.export's pre-dispatch ATen (linear, gelu, layer_norm and attention are still whole), called as the model.
    name: of the model's class, for messages.
    tied_names: parameter name -> its other names in the model; a checkpoint has only one of them.
    constants: keyword inputs of the example that are no tensors; they are part of the graph and may be left out.
    one_shape: it holds for the sizes of the example only.
    state_inputs: names of inputs that live on the ranks: each passes in its own part (keys and values).
    """

    gm: GraphModule
    name: str
    tied_names: Mapping[str, list[str]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    one_shape: bool = True
    state_inputs: frozenset[str] = frozenset()


def export(model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any = None) -> CapturedModel:
    """Export `model` at these inputs.

    example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.
    dynamic_shapes: as torch.export.export takes it; keyword inputs that it does not name are of fixed size.
    Raises: ShardError if the model cannot be exported (control flow that depends on data, graph breaks).
    """
    args, kwargs = as_args(example_inputs)
    one_shape = dynamic_shapes is None
    if isinstance(dynamic_shapes, dict):  # torch.export wants every input named, fixed ones with None
        dynamic_shapes = {**dict.fromkeys(kwargs), **dynamic_shapes}
    try:
        with torch.no_grad():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as e:  # torch.export has no common base class for its failures
        raise ShardError(
            f"{type(model).__name__} cannot be captured as one graph by torch.export: {type(e).__name__}: {e}"
        ) from e
    gm = program.module()
    assert isinstance(gm, GraphModule)
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    return CapturedModel(gm, type(model).__name__, _tied_names(model), constants, one_shape)


def _tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    names_of: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(param), []).append(name)
    return {n: [m for m in names if m != n] for names in names_of.values() if len(names) > 1 for n in names}


def as_args(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs): a tensor, a tuple of positional inputs, or a dict of keyword inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
