"""A phase switch and collectives under way."""

import pytest
import torch
import torch.distributed as dist

from numadist.errors import PlanError
from numadist.phases.phase import current_phase, phase

pytestmark = pytest.mark.mp


def check_switch_inside_an_open_collective(rank, world):
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(8)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(PlanError, match="1 collectives of this process are under way"), phase("decode"):
            pass
        assert current_phase() is None
        store.set("switch tried", "")
        work.wait()
    else:
        store.wait(["switch tried"])  # until then rank 0's sum cannot end
        dist.all_reduce(x)
    with phase("decode"):
        dist.all_reduce(x)
    return x[0].item()


def test_a_switch_inside_an_open_collective_is_an_error_and_after_it_is_not(numa_pair):
    assert numa_pair.run(check_switch_inside_an_open_collective) == [4.0, 4.0]
