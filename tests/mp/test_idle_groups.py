"""Groups that nobody uses cost nothing, and groups that were made and destroyed leave nothing."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mp


def of_process():
    """What this process holds."""
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": Path("/proc/self/maps").read_text().count("memfd:"),
    }, resident


def check_idle(rank, world):
    dist.barrier()
    before, resident = of_process()
    groups = [dist.new_group() for _ in range(20)]
    held, resident_with = of_process()
    assert held["threads"] == before["threads"]
    # One a peer, which tells when the peer ends.
    assert held["descriptors"] == before["descriptors"] + 20 * (world - 1)
    assert held["segments"] == before["segments"] + 20
    # Without a thread nothing can use a CPU. Memory: the first pages of the segment, and Python's objects; 25 KiB.
    assert resident_with - resident < 20 * 100, f"{resident_with - resident} KiB for 20 groups"
    for group in groups:
        dist.destroy_process_group(group)


def test_idle_groups_hold_no_thread_and_little_memory(pool):
    pool.run(check_idle)


def check_many(rank, world, count):
    def make():
        group = dist.new_group()
        x = torch.ones(100)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    for _ in range(20):
        make()
    before, resident = of_process()
    for _ in range(count):
        make()
    dist.barrier()
    after, resident_after = of_process()
    assert after == before, f"{after} after {before}"
    return (resident_after - resident) / count


def test_groups_leave_nothing(pool):
    """100 of them, for every run of the tests."""
    pool.run(check_many, 100)


@pytest.mark.slow
def test_a_thousand_groups_leave_nothing(numa_pair):
    per_group_kib = numa_pair.run(check_many, 1000)
    assert max(per_group_kib) < 16, per_group_kib
