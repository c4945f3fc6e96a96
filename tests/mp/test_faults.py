"""What survivors see when a rank dies, is late or calls something else; and that nothing is left behind."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import ranks, shm_files

from numadist.comm.registry import find
from numadist.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

pytestmark = pytest.mark.mp

# A deadline no test lives to see: what is told before it was noticed, not waited for.
NEVER_S = 1e5


def call(name, world):
    """One collective by name, on small tensors."""
    x = torch.ones(64)
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce of int32": lambda: dist.all_reduce(x.int()),
        "all_reduce MAX": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        "all_reduce of 63": lambda: dist.all_reduce(x[:63]),
        "all_gather": lambda: dist.all_gather([torch.empty(64) for _ in range(world)], x),
        "reduce_scatter": lambda: dist.reduce_scatter(x, [torch.ones(64) for _ in range(world)]),
        "broadcast from 0": lambda: dist.broadcast(x, src=0),
        "broadcast from 1": lambda: dist.broadcast(x, src=1),
        "barrier": lambda: dist.barrier(),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(world), torch.ones(world)),
    }
    calls[name]()


def call_until_error(rank, world, name):
    """Repeat a collective until it raises; (kind of error, its text)."""
    try:
        while True:
            call(name, world)
    except CommError as error:
        return type(error).__name__, str(error)


def call_once(rank, world, name):
    try:
        call(name, world)
    except CommError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast from 0", "barrier"]
)
def test_killed_rank_raises_peer_lost_on_every_survivor_long_before_the_deadline(name):
    with ranks(3, timeout_s=NEVER_S) as pool:
        for rank in (0, 1):
            pool.send(rank, call_until_error, name)
        # Rank 2 takes part a thousand times and then dies, in the middle of things for the others.
        pool.send(2, die_after, name, 1000)
        pool.processes[2].join()
        for rank, (kind, text) in enumerate(pool.answers([0, 1])):
            assert kind == PeerLost.__name__, f"rank {rank}: {kind}: {text}"
            assert f"rank 2 (pid {pool.pids[2]})" in text, text


def die_after(rank, world, name, times):
    for _ in range(times):
        call(name, world)
    os.kill(os.getpid(), signal.SIGKILL)


def test_peer_lost_while_asleep_on_it():
    with ranks(2, timeout_s=NEVER_S) as pool:
        pool.send(0, call_until_error, "barrier")
        wait_until_asleep(pool.pids[0])
        os.kill(pool.pids[1], signal.SIGKILL)
        kind, text = pool.answers([0])[0]
        assert kind == PeerLost.__name__, text


def wait_until_asleep(pid):
    """Until the main thread of a process waits in a futex of limited time, as a rank does after spinning."""
    while True:
        with open(f"/proc/{pid}/syscall") as file:
            if file.read().split()[0] == "202":
                return
        os.sched_yield()


def set_timeout(rank, world, timeout_s):
    find(dist.group.WORLD.group_name).set_timeout(timedelta(seconds=timeout_s))


def test_late_rank_is_named_in_the_timeout():
    with ranks(3) as pool:
        pool.run(set_timeout, 2.5)  # not from the start: ranks join when they have imported torch
        for rank in (0, 1):
            pool.send(rank, call_once, "all_reduce")
        for rank, (kind, text) in enumerate(pool.answers([0, 1])):
            assert kind == CollectiveTimeout.__name__, f"rank {rank}: {kind}: {text}"
            assert "all_reduce(SUM, float32, 256 bytes)" in text, text
            assert "rank 2" in text, text
            assert "2.5 s" in text, text
        # The late rank must not go on alone, and the error stays.
        for _ in range(2):
            pool.send(2, call_once, "all_reduce")
            kind, text = pool.answers([2])[0]
            assert kind == CollectiveTimeout.__name__, text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("all_reduce", "barrier"),
        ("all_reduce", "all_reduce of int32"),
        ("all_reduce", "all_reduce MAX"),
        ("all_reduce", "all_reduce of 63"),
        ("all_reduce", "all_gather"),
        ("broadcast from 0", "broadcast from 1"),
        ("reduce_scatter", "all_to_all"),
    ],
)
def test_different_calls_name_both_sides_on_every_rank(first, second):
    with ranks(2) as pool:
        pool.send(0, call_once, first)
        pool.send(1, call_once, second)
        for rank, answer in enumerate(pool.answers([0, 1])):
            assert answer is not None, f"rank {rank}: {first} against {second} returned"
            kind, text = answer
            assert kind == CollectiveMismatch.__name__, f"rank {rank}: {kind}: {text}"
            sides = re.findall(r"rank \d called (\w+)", text)
            assert len(sides) == 2, text


def make_and_destroy_groups(rank, world, times):
    for _ in range(times):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    with open("/proc/self/maps") as maps:
        segments = sum("numadist" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), segments


def test_groups_leave_no_fd_no_mapping_and_no_file():
    files = shm_files()
    with ranks(2) as pool:
        pool.run(make_and_destroy_groups, 1)
        before = pool.run(make_and_destroy_groups, 1)
        after = pool.run(make_and_destroy_groups, 30)
        assert after == before, f"(fds, segments) per rank: {before} after 2 groups, {after} after 32"
        assert shm_files() <= files, "new files in /dev/shm"


def use_group_in_fork(rank, world):
    child = os.fork()
    if child == 0:
        answer = call_once(rank, world, "all_reduce")
        os._exit(0 if answer is not None and "fork" in answer[1] else 1)
    status = os.waitpid(child, 0)[1]
    dist.barrier()
    return status


def test_fork_cannot_disturb_the_group():
    with ranks(2) as pool:
        assert pool.run(use_group_in_fork) == [0, 0]


def use_destroyed_group(rank, world):
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(CommError, match="destroyed"):
        group.allreduce([torch.ones(1)])


def test_destroyed_group_says_so():
    with ranks(2) as pool:
        pool.run(use_destroyed_group)


def abort_while_the_other_waits(rank, world):
    group = dist.new_group()
    if rank == 1:
        group.abort()
    try:
        while True:
            dist.barrier(group)
    except CommError as error:
        return str(error)


def test_abort_ends_the_calls_of_every_rank():
    with ranks(2) as pool:
        for text in pool.run(abort_while_the_other_waits):
            assert "was aborted by rank 1" in text, text


def leave_with_work_outstanding(rank, world):
    group = dist.new_group()
    if rank == 1:
        dist.destroy_process_group(group)
        return None
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    try:
        work.wait()
    except CommError as error:
        return type(error).__name__


def test_work_waiting_for_a_rank_that_destroyed_the_group_raises_peer_lost():
    with ranks(2) as pool:
        assert pool.run(leave_with_work_outstanding) == [PeerLost.__name__, None]


def mismatch_after_some_calls(rank, world):
    dist.barrier()
    dist.all_reduce(torch.ones(2, dtype=torch.bfloat16))
    return call_once(rank, world, "barrier" if rank else "all_reduce")


def test_error_tells_the_calls_before_it():
    with ranks(2) as pool:
        for _, text in pool.run(mismatch_after_some_calls):
            assert "before it on this rank: barrier, all_reduce(SUM, bfloat16, 4 bytes)" in text, text
