"""Memory of this rank: the node or nodes numarun bound it to."""

import functools

import torch
from torch import Tensor

from numadist.config import config
from numadist.errors import BindError
from numadist.log import get_logger
from numadist.memory.tensors import empty
from numadist.topology.cpuset import parse_list

log = get_logger(__name__)


def local_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Contiguous tensor in fresh memory of this rank's node, contents undefined.

    With one node the pages are bound to it explicitly. Without numarun, on a rank that spans several nodes, or where
    mbind is refused, the tensor follows the process's memory policy.
    """
    nodes = parse_list(config().nodes)
    if len(nodes) == 1:
        try:
            return empty(shape, dtype, numa_node=nodes[0])
        except BindError as error:
            _warn_once(str(error))
    return torch.empty(shape, dtype=dtype)


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("weights are not bound to this rank's node, they follow its memory policy: %s", reason)
