"""torch.compile for inference, with the weights packed once ("freezing").

`torch.compile(..., options={"freezing": True})` does not do it: Dynamo decides before it applies any option, by the
global setting alone, whether parameters become constants, and without a word leaves them inputs (torch 2.13).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from numadist.log import get_logger
from numadist.progress import progress

log = get_logger(__name__)


def compile_frozen(
    module: torch.nn.Module, dynamic: bool | None = None, one_shape: bool = False
) -> Callable[..., Any]:
    """Inductor's C++ for the module with its weights packed; runs without gradients.

    The first call of every combination of input sizes may compile. dynamic: as torch.compile takes it.
    one_shape: inputs never change their sizes, so what was packed is dropped from the module, which then holds the
    weights once instead of twice and runs only through what is returned here.
    """
    compiled = torch.compile(module, dynamic=dynamic, options={"freezing_discard_parameters": one_shape})
    seen: set[tuple[Any, ...]] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        sizes = _sizes((*args, *kwargs.values()))
        with torch.no_grad():
            if sizes in seen:
                return compiled(*args, **kwargs)
            begin = time.monotonic()
            log.info("compiling %s for inputs %s", type(module).__name__, _shown(sizes))
            with progress("compiling"), freezing():
                result = compiled(*args, **kwargs)
            log.info("compiled and ran in %.1f s", time.monotonic() - begin)
        seen.add(sizes)
        return result

    return run


def _sizes(inputs: Any) -> tuple[Any, ...]:
    """What Dynamo may compile anew for."""
    return tuple(a.shape if isinstance(a, torch.Tensor) else a for a in tree_leaves(inputs))


def _shown(sizes: tuple[Any, ...]) -> str:
    return ", ".join(str(list(s)) for s in sizes if isinstance(s, torch.Size))


_lock = threading.Lock()
_inside = 0


@contextmanager
def freezing() -> Iterator[None]:
    """The global setting, on while any thread is inside: thread groups compile at the same time."""
    import torch._inductor.config as inductor_config  # late: it brings Dynamo, a second of a start

    global _inside
    with _lock:
        _inside += 1
        inductor_config.freezing = True
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                inductor_config.freezing = False
