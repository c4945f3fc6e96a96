"""Making a group: who is in it, on which machines, and so which kind of group it is."""

from typing import Any

from torch._C._distributed_c10d import Store

import numadist.comm.ops  # noqa: F401  (registers torch.ops.numadist.*)
from numadist import _native
from numadist.comm import members, segment
from numadist.comm.base import NumaGroup
from numadist.comm.machines_group import MachinesGroup
from numadist.comm.shm_group import ShmGroup
from numadist.errors import CommError
from numadist.log import get_logger

log = get_logger(__name__)


def create(options: Any, backend_options: Any) -> NumaGroup:
    """torch's creator function: waits for all ranks of the group. Raises: CommError, ConfigError."""
    rank, world = options.group_rank, options.group_size
    if not 1 <= world <= _native.MAX_WORLD:
        raise CommError(f"backend numa takes 1 to {_native.MAX_WORLD} ranks, this group has {world}")
    group = connect(options.store, rank, world, options.timeout.total_seconds())
    log.debug("rank %d of %d: group %s connected", rank, world, options.group_id)
    return group


def connect(store: Store, rank: int, world: int, timeout_s: float) -> NumaGroup:
    """A group over all ranks that meet in the store under its present prefix."""
    everybody = members.meet(store, rank, world, timeout_s)
    machines = members.machines_of(everybody)
    mine = next(ranks for ranks in machines if rank in ranks)
    handle = segment.open_group(store, mine, rank, [everybody[r] for r in mine], timeout_s)
    if len(machines) == 1:
        return ShmGroup(handle, rank, world, timeout_s, store, connect)
    return MachinesGroup(handle, rank, machines, timeout_s, store, connect)
