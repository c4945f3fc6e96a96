"""Memory of this rank: the node or nodes numarun bound it to."""

import torch
from torch import Tensor

from numadist.config import config
from numadist.memory.tensors import clone
from numadist.topology.cpuset import parse_list


def local_copy(t: Tensor) -> Tensor:
    """A copy in fresh memory of this rank's node.

    With one node the pages are bound to it explicitly. Without numarun, or on a rank that spans several nodes,
    the copy follows the process's memory policy.
    """
    nodes = parse_list(config().nodes)
    if len(nodes) == 1:
        return clone(t.contiguous(), numa_node=min(nodes))
    return t.clone(memory_format=torch.contiguous_format)
