"""Work objects of collectives that are complete when the call returns."""

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]


class DoneWork(Work):
    """A finished collective whose result nobody asked for as a future."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        return _completed_future([])


DONE = DoneWork()


def _completed_future(result: Any) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return future


def finished(opts: Any, tensors: list[Tensor]) -> Work:
    """Work of a call that is done: one shared object for blocking calls, one with a future for async ones."""
    if opts is not None and not opts.asyncOp:
        return DONE
    return _create_work_from_future(_completed_future(tensors))
