"""The second signatures of torch's ProcessGroup: single tensors for lists, options given one by one.

DDP's join() and older programs call them: `group.allreduce(tensor, ReduceOp.MAX)`, `group.allgather(list, tensor)`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

# An argument of the second signature -> the attribute of torch's options.
_ATTRIBUTES = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
# Method -> its options, what the second signature takes in their stead in this order, and the names of its tensors:
# each as the first signature calls it, and as the second does.
_SIGNATURES: dict[str, tuple[type, Sequence[str], Sequence[tuple[str, str]]]] = {
    "allreduce": (AllreduceOptions, ("op", "timeout"), [("tensors", "tensor")]),
    "broadcast": (BroadcastOptions, ("root", "timeout"), [("tensors", "tensor")]),
    "reduce": (ReduceOptions, ("root", "op", "timeout"), [("tensors", "tensor")]),
    "allgather": (
        AllgatherOptions,
        ("timeout",),
        [("output_tensors", "output_tensors"), ("input_tensors", "input_tensor")],
    ),
    "gather": (
        GatherOptions,
        ("root", "timeout"),
        [("output_tensors", "output_tensors"), ("input_tensors", "input_tensor")],
    ),
    "scatter": (
        ScatterOptions,
        ("root", "timeout"),
        [("output_tensors", "output_tensor"), ("input_tensors", "input_tensors")],
    ),
    "reduce_scatter": (
        ReduceScatterOptions,
        ("op", "timeout"),
        [("output_tensors", "output"), ("input_tensors", "input")],
    ),
    "all_to_all_single": (
        AllToAllOptions,
        ("timeout",),
        [
            ("output", "output"),
            ("input", "input"),
            ("output_split_sizes", "output_split_sizes"),
            ("input_split_sizes", "input_split_sizes"),
        ],
    ),
    "barrier": (BarrierOptions, ("timeout",), []),
}


def overloaded(method: Callable[..., Work]) -> Callable[..., Work]:
    """Have a method of (self, *lists of tensors, options) take both of torch's signatures."""
    options, fields, names = _SIGNATURES[method.__name__]
    num_tensors = len(names)
    lists = method.__name__ != "all_to_all_single"

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Work:
        if args and type(args[-1]) is options and type(args[0]) is list and not kwargs:
            return method(self, *args)  # as torch's own functions call it: nothing to look at
        if kwargs:
            args = _by_position(method.__name__, names, fields, args, kwargs)
        tensors, rest = args[:num_tensors], args[num_tensors:]
        if lists and any(isinstance(t, Tensor) for t in tensors):
            tensors = tuple([t] for t in tensors)
        if rest and not (len(rest) == 1 and (rest[0] is None or hasattr(rest[0], "asyncOp"))):
            rest = (_options(options, dict(zip(fields, rest, strict=False))),)
        return method(self, *tensors, *rest)

    return call


def _by_position(
    method: str,
    names: Sequence[tuple[str, str]],
    fields: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    given = list(args)
    for spellings in names[len(args) :]:
        found = [kwargs.pop(name) for name in dict.fromkeys(spellings) if name in kwargs]
        if len(found) != 1:
            raise TypeError(f"{method}() needs {' or '.join(dict.fromkeys(spellings))}")
        given += found
    if "opts" in kwargs:
        given.append(kwargs.pop("opts"))
    elif kwargs:
        # None in the place of a field leaves it at torch's default.
        rest = [kwargs.pop(name, None) for name in fields[len(given) - len(names) :]]
        given += rest
    if kwargs:
        raise TypeError(f"{method}() takes no argument {sorted(kwargs)}")
    return tuple(given)


def _options(options: type, fields: dict[str, Any]) -> Any:
    made = options()
    for name, value in fields.items():
        if value is not None:
            setattr(made, _ATTRIBUTES[name], value)
    return made
