"""Captured graphs from one start to the next, and from the first rank to the others."""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import numadist
from numadist.cache.store import Store
from numadist.config import cache_folder
from numadist.graph import saved
from numadist.graph.capture import as_args
from numadist.graph.model_key import NoKey, files_digest, inputs_of, model_key
from numadist.log import get_logger
from numadist.progress import progress

log = get_logger(__name__)

# Ranks wait so long for the one that captures, then capture themselves.
PATIENCE_S = 300.0
# The entry of a graph that cannot be kept, or of a model that cannot be captured.
_NOT_KEPT = b"not kept"
_CAPTURING = "capturing the model"
# Parts of this package that decide what a graph is.
_PARTS = ("cache", "graph", "sharding", "pipeline", "generation")


def remembered(
    fresh: Callable[[], GraphModule],
    model: torch.nn.Module,
    example_inputs: Any,
    dynamic_shapes: Any = None,
    train: bool = False,
    patience_s: float = PATIENCE_S,
) -> GraphModule:
    """What fresh() returns, from the cache folder if it is there; of processes that start together one captures.

    patience_s: how long to wait for another process.
    """
    folder = cache_folder()
    name = _key(model, example_inputs, dynamic_shapes, train) if folder is not None else None
    if folder is None or name is None:
        with progress(_CAPTURING):
            return fresh()
    store = Store(folder)
    found = _read(store, name, model)
    if found is None:
        with progress(_CAPTURING), store.claimed(name, patience_s):
            found = _read(store, name, model)  # it may have come while this waited
            if found is None:
                return _captured(fresh, store, name, model)
    if found == _NOT_KEPT:  # nobody waits for what nobody writes
        with progress(_CAPTURING):
            return _captured(fresh, store, name, model)
    assert isinstance(found, GraphModule)
    return found


def _captured(
    fresh: Callable[[], GraphModule], store: Store, name: str, model: torch.nn.Module
) -> GraphModule:
    """Capture and keep; in the place of a graph that cannot be kept stands that it cannot."""
    entry = _NOT_KEPT
    try:
        gm = fresh()
        entry = saved.save(gm, model)
    except saved.NotSaved as reason:
        log.debug("the graph of %s is not remembered: %s", type(model).__name__, reason)
    finally:
        store.write(name, entry)
    return gm


def _key(model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any, train: bool) -> str | None:
    begin = time.monotonic()
    try:
        others = inputs_of(*as_args(example_inputs)), dynamic_shapes, train, _own_code()
        key = model_key(model, *others)
    except NoKey as reason:
        log.debug("the graph of %s is not remembered: it has %s", type(model).__name__, reason)
        return None
    log.debug("key of %s in %.2f s", type(model).__name__, time.monotonic() - begin)
    return f"graph-{key}"


@cache
def _own_code() -> str:
    own = Path(numadist.__file__).parent
    return numadist.__version__ + files_digest(own / part for part in _PARTS)


def _read(store: Store, name: str, model: torch.nn.Module) -> GraphModule | bytes | None:
    """The graph, or _NOT_KEPT; None if nothing is known of it."""
    begin = time.monotonic()
    data = store.read(name)
    if data is None or data == _NOT_KEPT:
        return data
    try:
        gm = saved.load(data, model)
    except saved.NotSaved as reason:
        log.debug("%s in %s is ignored: %s", name, store.folder, reason)
        return None
    log.debug("graph of %s from %s in %.1f s", type(model).__name__, store.folder, time.monotonic() - begin)
    return gm
