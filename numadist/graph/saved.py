"""A captured graph as bytes, without its weights: the model it is read for brings its own.

Nodes, what is known of their values (symbolic sizes too) and the check of inputs are written; a parameter or buffer of
the graph is written as its name in the model.
"""

import inspect
import io
import marshal
import math
import operator
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

# What later stages ask nodes for, and what messages show.
_META = frozenset({"val", "nn_module_stack", "stack_trace", "torch_fn"})
_GUARDS = "_guards_fn"
# A tensor that forward makes of constants is a part of the graph; a larger one may be somebody's weights.
_MAX_CONSTANT = 4096
_PARAMETER, _BUFFER, _CONSTANT = "parameter", "buffer", "constant"


class NotSaved(Exception):
    """This graph has something that bytes do not hold; the text says what."""


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the graph's modules: its place, and where it comes from: a path in the model, or its value."""

    place: str
    kind: str
    path: str | None
    value: tuple[bytes, torch.dtype, tuple[int, ...]] | None = None
    persistent: bool = True


@dataclass(frozen=True)
class _Saved:
    graph: Any
    modules: tuple[tuple[str, bool], ...]  # path, training
    tensors: tuple[_Tensor, ...]
    guards: bytes | None
    range_constraints: Any
    meta: dict[str, Any]


def save(gm: GraphModule, model: torch.nn.Module) -> bytes:
    """Raises: NotSaved."""
    modules = [(name, m.training) for name, m in gm.named_modules() if name not in ("", _GUARDS)]
    strange = [name for name, _ in modules if type(gm.get_submodule(name)) is not torch.nn.Module]
    if strange:
        raise NotSaved(f"it calls {type(gm.get_submodule(strange[0])).__name__} {strange[0]}")
    guards = getattr(gm, _GUARDS, None)
    try:
        # Torch's private module: whatever another torch changed in it, this graph is then not saved.
        from torch.fx._graph_pickler import Options, _GraphPickleData

        from numadist.graph.saved_values import Pickler

        options = Options(ops_filter=None, node_metadata_key_filter=_META.__contains__)
        saved = _Saved(
            _GraphPickleData(gm.graph, options),
            tuple(modules),
            tuple(_tensors(gm, model)),
            None if guards is None else marshal.dumps(_check_of(guards)),
            gm.range_constraints,
            dict(gm.meta),
        )
        return Pickler.dumps(saved, options)
    except NotSaved:
        raise
    except Exception as reason:  # whatever a part of the graph raises that cannot be pickled
        raise NotSaved(f"{type(reason).__name__}: {reason}") from reason


def _check_of(guards: torch.nn.Module) -> types.CodeType:
    """The generated function, which a wrapper of torch's closes over."""
    inner = [
        c
        for c in inspect.getclosurevars(guards.forward).nonlocals.values()
        if isinstance(c, types.FunctionType)
    ]
    if len(inner) != 1 or inner[0].__code__.co_freevars:
        raise NotSaved("the check of its inputs is not torch.export's")
    return inner[0].__code__


def _tensors(gm: GraphModule, model: torch.nn.Module) -> list[_Tensor]:
    """In the order in which the graph's modules have them."""
    paths = _paths(model)
    found = []
    for prefix, module in gm.named_modules():
        for kind, tensors in (
            (_PARAMETER, module._parameters),
            (_BUFFER, module._buffers),
            (_CONSTANT, {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}),
        ):
            for name, t in tensors.items():
                if t is None:
                    continue
                place = f"{prefix}.{name}" if prefix else name
                own = paths.get(id(t), [])
                path = place if place in own else next(iter(own), None)
                persistent = name not in module._non_persistent_buffers_set
                value = None if path is not None else _value(place, kind, t)
                found.append(_Tensor(place, kind, path, value, persistent))
    return found


def _paths(model: torch.nn.Module) -> dict[int, list[str]]:
    """Id of a tensor that the model has as parameter, buffer or attribute -> its names."""
    found: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**vars(module), **module._parameters, **module._buffers}
        for name, t in own.items():
            if isinstance(t, Tensor):
                found.setdefault(id(t), []).append(f"{prefix}.{name}" if prefix else name)
    return found


def _value(place: str, kind: str, t: Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    if kind == _PARAMETER or t.numel() > _MAX_CONSTANT or type(t) is not Tensor or t.device.type != "cpu":
        raise NotSaved(f"{place} is neither the model's own nor a small constant")
    if not t.is_contiguous():
        raise NotSaved(f"{place} is a constant with strides of its own")
    flat = t.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if t.numel() else b"", t.dtype, tuple(t.shape)


def load(data: bytes, model: torch.nn.Module) -> GraphModule:
    """The graph over this model's tensors. Raises: NotSaved if the bytes hold none for this model."""
    try:
        return _load(data, model)
    except Exception as reason:  # bytes of another torch may fail anywhere
        raise NotSaved(f"{type(reason).__name__}: {reason}") from reason


def _load(data: bytes, model: torch.nn.Module) -> GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.export._unlift import _check_input_constraints_pre_hook, _StatefulGraphModule
    from torch.fx._graph_pickler import _GraphUnpickler, _UnpickleState, patch_pytree_map_over_slice
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, export=True, shape_env=ShapeEnv(tracked_fakes=[]))
    state = _UnpickleState(mode)
    with patch_pytree_map_over_slice(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, when a spec of inputs is made
        saved: _Saved = _GraphUnpickler(io.BytesIO(data), state).load()
    gm: GraphModule = _StatefulGraphModule._create(  # type: ignore[no-untyped-call]
        torch.nn.Module(), Graph(), saved.range_constraints
    )
    for name, training in saved.modules:
        module = torch.nn.Module()
        module.training = training
        owner, _, leaf = name.rpartition(".")
        gm.get_submodule(owner).add_module(leaf, module)
    for t in saved.tensors:
        tensor = operator.attrgetter(t.path)(model) if t.path is not None else _made(t)
        owner, _, leaf = t.place.rpartition(".")
        module = gm.get_submodule(owner)
        if t.kind == _BUFFER:
            module.register_buffer(leaf, tensor, persistent=t.persistent)
        else:
            setattr(module, leaf, tensor)
    if saved.guards is not None:
        gm.add_module(_GUARDS, _guards(marshal.loads(saved.guards)))
    gm.meta.update(saved.meta)
    gm.graph = saved.graph.unpickle(gm, state)
    gm.register_forward_pre_hook(_check_input_constraints_pre_hook, with_kwargs=True)
    return gm


def _made(t: _Tensor) -> Tensor:
    assert t.value is not None, f"{t.place} comes from nowhere"
    data, dtype, shape = t.value
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _guards(code: types.CodeType) -> torch.nn.Module:
    """As torch.export makes it of the check's code."""
    from torch.export._unlift import GuardsFn
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    check = types.FunctionType(code, {**SYMPY_INTERP, "math": math, "inf": math.inf})
    guards = GuardsFn()
    guards.forward = torch._dynamo.dont_skip_tracing(check)  # type: ignore[method-assign]
    guards._is_impure = True  # type: ignore[assignment]
    return guards
