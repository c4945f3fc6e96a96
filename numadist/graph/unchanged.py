"""Leave the caller's model as it was: tracing runs its forward, which may keep tensors in attributes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Give every module the attributes back that it has now, and the contents of those that are lists or dicts.

    Some rotary embeddings keep the table of the longest input so far; a traced one would be a tensor without memory.
    """
    kept = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in kept:
            vars(module).clear()
            vars(module).update(attributes)
            for container, before in contents:
                _restore(container, before)


def _contents(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    """(container, copy of what is in it) of parameters, buffers, submodules and the model's own containers."""
    return [(value, value.copy()) for value in vars(module).values() if type(value) in (dict, list, set)]


def _restore(container: Any, before: Any) -> None:
    if _same(container, before):
        return
    container.clear()
    container.extend(before) if isinstance(container, list) else container.update(before)


def _same(now: Any, before: Any) -> bool:
    """By identity: comparing tensors would compare their elements."""
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is before[key] for key in now)
    if isinstance(now, set):
        return {id(item) for item in now} == {id(item) for item in before}
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
