"""The open groups by torch's name, and what the rest of numadist may ask of them.

Groups enter themselves here, so this file knows none of their classes: only what all of them can do.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from numadist._native import Op
from numadist.comm.fused import AfterSum
from numadist.errors import CommError


@dataclass(frozen=True)
class CommStats:
    """Counters of a group on this rank."""

    num_calls: int
    total_ns: int
    wait_ns: int  # of total_ns: waiting for peers


@runtime_checkable
class OpenGroup(Protocol):
    """A group of backend numa, be its ranks on one machine or on several: numadist.comm.base.NumaGroup."""

    def all_reduce_(self, t: Tensor, op: Op) -> None:
        """Replace t by its reduction over the group; every rank gets the same bits."""

    def reduce_scatter_(self, out: Tensor, t: Tensor, op: Op) -> None:
        """Write into out this rank's part, an R-th, of the reduction of t over the ranks."""

    def all_gather_(self, out: Tensor, t: Tensor) -> None:
        """Write into out everybody's t, one after the other."""

    def all_reduce_fused(self, x: Tensor, out: Tensor, after: AfterSum) -> None:
        """Sum x over the ranks and finish the sum in one pass; x is only read."""

    def num_running(self) -> int:
        """How many collectives of this group run in the background."""

    def counters(self, reset: bool) -> CommStats:
        """What this rank's calls cost since the last reset."""


# pybind does not keep a Python subclass alive for C++, so this does.
_open: dict[str, OpenGroup] = {}


def add(name: str, group: OpenGroup) -> None:
    _open[name] = group


def remove(name: str) -> None:
    """Forget a group; nothing happens if the name is not known."""
    _open.pop(name, None)


def find(name: str) -> OpenGroup:
    """The open group of a name. Raises: CommError."""
    try:
        return _open[name]
    except KeyError:
        raise CommError(
            f"no group {name!r} of backend numa in this process; open ones: {sorted(_open)}"
        ) from None


def num_open() -> int:
    """Collectives of all groups that async_op=True started and that are still under way."""
    return sum(group.num_running() for group in _open.values())


def stats(group: ProcessGroup | None = None, reset: bool = False) -> CommStats:
    """Counters of a group (default: the default group) since the last reset; times are taken from the first one on."""
    asked = group if group is not None else torch.distributed.group.WORLD
    if not isinstance(asked, OpenGroup):
        raise CommError(f"only groups of backend numa have counters, got {asked!r}")
    return asked.counters(reset)
