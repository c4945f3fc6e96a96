"""What is known of the values of a saved graph's nodes, in few words: layers repeat, and so do sizes.

This imports a private module of torch, so it is imported only where a failure means that nothing is saved.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._graph_pickler import GraphPickler, Options


class _Like:
    """A tensor without memory; nodes whose values are alike share one."""

    def __init__(self, t: FakeTensor) -> None:
        self.about = t.dtype, t.device, tuple(t.shape), t.stride()
        self.made: torch.Tensor | None = None

    def __getstate__(self) -> Any:
        return self.about

    def __setstate__(self, about: Any) -> None:
        self.about, self.made = about, None


class Pickler(GraphPickler):
    """Writes alike values once. Others, such as parameters, are written by torch as they are."""

    def __init__(self, file: Any, options: Options | None = None) -> None:
        super().__init__(file, options)
        self._alike: dict[Any, _Like] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not FakeTensor or not _is_plain(obj):
            return super().reducer_override(obj)
        key = obj.dtype, str(obj.device), str(tuple(obj.shape)), str(obj.stride())
        return _made, (self._alike.setdefault(key, _Like(obj)), self._unpickle_state)


def _is_plain(t: FakeTensor) -> bool:
    if (
        t.requires_grad
        or t.layout is not torch.strided
        or t.constant is not None
        or t.is_conj()
        or t.is_neg()
    ):
        return False
    return t.storage_offset() == 0


def _made(like: _Like, state: Any) -> torch.Tensor:
    if like.made is None:
        dtype, device, shape, stride = like.about
        with state.fake_mode:
            like.made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return like.made
