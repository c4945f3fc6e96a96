"""From an unmodified model to one exported graph, with its call signature and parameter names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.graph.tied import tied_names
from numadist.graph.unchanged import unchanged


@dataclass
class CapturedModel:
    """A model as one graph, before it is cut for a rank.

    gm: torch.export's pre-dispatch ATen (linear, gelu, layer_norm and attention are still whole), called as the model.
    name: of the model's class, for messages.
    tied_names: parameter name -> its other names in the model; a checkpoint has only one of them.
    constants: keyword inputs of the example that are no tensors; they are part of the graph and may be left out.
    one_shape: it holds for the sizes of the example only.
    state_inputs: names of inputs that live on the ranks: each passes in its own part (keys and values).
    persistent_buffers: names of buffers that checkpoints have.
    state_names: of all that the model's state_dict has.
    training: the mode that the model was in. hidden_dropout: in training mode it has dropout.
    """

    gm: GraphModule
    name: str
    tied_names: Mapping[str, list[str]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    one_shape: bool = True
    state_inputs: frozenset[str] = frozenset()
    persistent_buffers: frozenset[str] = frozenset()
    state_names: frozenset[str] = frozenset()
    training: bool = False
    hidden_dropout: bool = False


def export(
    model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any = None, train: bool = False
) -> CapturedModel:
    """Export `model` at these inputs; the model itself, its attributes included, is as before.

    example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.
    dynamic_shapes: as torch.export.export takes it; keyword inputs that it does not name are of fixed size.
    train: gradients will flow through the graph, so it has the model's own no_grad() in it.
    Raises: ShardError if the model cannot be exported (control flow that depends on data, graph breaks), or for
        training has an autograd.Function, whose backward a graph does not have.
    """
    args, kwargs = as_args(example_inputs)
    if isinstance(dynamic_shapes, dict):  # torch.export wants every input named, fixed ones with None
        dynamic_shapes = {**dict.fromkeys(kwargs), **dynamic_shapes}
    try:
        with unchanged(model), torch.set_grad_enabled(train), _custom_backward_refused(train):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except ShardError:
        raise
    except Exception as e:  # torch.export has no common base class for its failures
        raise ShardError(
            f"{type(model).__name__} cannot be captured as one graph by torch.export: {type(e).__name__}: {e}"
        ) from e
    gm = program.module()
    assert isinstance(gm, GraphModule)
    return described(gm, model, example_inputs, dynamic_shapes)


def described(
    gm: GraphModule, model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any
) -> CapturedModel:
    """The model's graph, with what else is asked about the model."""
    _, kwargs = as_args(example_inputs)
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    state_names = frozenset(model.state_dict(keep_vars=True))
    return CapturedModel(
        gm,
        type(model).__name__,
        tied_names(model),
        constants,
        dynamic_shapes is None,
        persistent_buffers=state_names & {name for name, _ in model.named_buffers(remove_duplicate=False)},
        state_names=state_names,
        training=model.training,
        hidden_dropout=_has_dropout(model),
    )


def _has_dropout(model: torch.nn.Module) -> bool:
    """By its modules, and by the probabilities of its config, as transformers names them."""
    dropouts = (m for m in model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd))
    options = vars(model.config) if hasattr(getattr(model, "config", None), "__dict__") else {}
    named = (p for name, p in options.items() if "drop" in name and isinstance(p, int | float))
    return any(m.p > 0 for m in dropouts) or any(p > 0 for p in named)


@contextmanager
def as_in_export() -> Iterator[None]:
    """A call of the model inside takes the branches that export takes: models ask torch whether they are compiled."""
    state = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = state


@contextmanager
def _custom_backward_refused(train: bool) -> Iterator[None]:
    """torch.export traces the forward of an autograd.Function and forgets its backward without a word."""
    if not train:
        yield
        return

    apply = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if (
            cls.__module__ == "torch._library.autograd"
        ):  # of a custom op, which is in the graph with its backward
            return apply.__get__(None, cls)(*args, **kwargs)
        raise ShardError(
            f"forward calls the autograd.Function {cls.__qualname__}, whose backward a captured graph does not have: "
            "it cannot be trained sharded; write it with torch's own ops, or train the model without numadist.shard"
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def as_args(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs): a tensor, a tuple of positional inputs, or a dict of keyword inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
