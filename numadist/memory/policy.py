"""Bind a range of memory to nodes, before it is touched, and prove it."""

import errno
import os
from collections.abc import Iterable

from numadist import _native
from numadist.errors import BindError
from numadist.log import get_logger

log = get_logger(__name__)


def bind(address: int, num_bytes: int, nodes: Iterable[int]) -> None:
    """Bind the pages of a range to nodes (mbind, MPOL_BIND). Raises: BindError.

    The kernel drops nodes it cannot use in silence, so what it kept is read back.
    """
    asked = frozenset(nodes)
    code = _native.bind_memory(address, num_bytes, asked)
    if code == -errno.EINVAL:
        raise BindError(
            f"asked for memory on nodes {sorted(asked)}: the kernel knows no such node with memory, or this "
            f"cgroup does not allow it (Mems_allowed in /proc/self/status)."
        )
    if code == -errno.EPERM:
        raise BindError(
            f"asked for memory on nodes {sorted(asked)}: mbind is forbidden here (a container's seccomp "
            f"filter?). Allow it, for docker with --cap-add SYS_NICE."
        )
    if code != 0:
        raise BindError(f"asked for memory on nodes {sorted(asked)}: mbind says {os.strerror(-code)}.")
    kept = _native.bound_nodes(address)
    if kept != asked:
        raise BindError(
            f"asked for memory on nodes {sorted(asked)}, the kernel kept {sorted(kept)}; "
            f"the others have no memory or are not allowed in this cgroup."
        )


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask for transparent huge pages; False where this kernel has none."""
    return _native.advise_huge(address, num_bytes) == 0


def touch(address: int, num_bytes: int) -> None:
    """Fault in all pages of a writable range. Raises: BindError when its nodes have no room."""
    code = _native.touch_memory(address, num_bytes)
    if code != 0:
        nodes = sorted(_native.bound_nodes(address))
        raise BindError(f"no {num_bytes} bytes free on nodes {nodes}: {os.strerror(-code)}.")
