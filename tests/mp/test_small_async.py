"""Small collectives with async_op=True: begun by who starts them, finished by who waits, without a thread."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

pytestmark = pytest.mark.mp


def num_threads_of_process():
    return len(list(Path("/proc/self/task").iterdir()))


def check_no_thread(rank, world):
    group = dist.new_group()
    before = num_threads_of_process()
    x = torch.full((4,), float(rank))
    gathered = torch.empty(4 * world)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_gather_single(gathered, x, group=group, async_op=True).wait()
    dist.broadcast(x, 0, group=group, async_op=True).wait()
    y = functional.wait_tensor(functional.all_reduce(x, "sum", group))
    assert num_threads_of_process() == before
    total = world * (world - 1) / 2
    assert torch.equal(gathered, torch.full((4 * world,), total))
    assert torch.equal(y, torch.full((4,), total * world))


def test_a_small_collective_starts_no_thread(pool):
    pool.run(check_no_thread)


def check_crossed(rank, world):
    # Rank 0 starts its sum before it sends what the others wait for before they start theirs.
    x, message = torch.ones(3), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        for peer in range(1, world):
            dist.send(torch.ones(1), peer)
    else:
        dist.recv(message, 0)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert torch.equal(x, torch.full((3,), float(world)))


def test_a_started_collective_does_not_hold_its_rank(pool):
    pool.run(check_crossed)


def check_polled(rank, world):
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(x, torch.full((3,), float(world)))


def test_asking_finishes_it(pool):
    pool.run(check_polled)


def check_in_order(rank, world):
    small, large, last = torch.ones(2), torch.ones(300_000), torch.ones(2)
    works = [dist.all_reduce(t, async_op=True) for t in (small, large, last)]
    direct = torch.ones(1)
    dist.all_reduce(direct)
    for work in reversed(works):
        work.wait()
    for t in (small, large, last, direct):
        assert torch.equal(t, torch.full_like(t, float(world)))


def test_small_and_large_ones_keep_their_order(pool):
    pool.run(check_in_order)


def check_other_thread(rank, world):
    # In one group started and direct calls follow each other; every thread has a group of its own.
    wrong = []
    groups = [dist.new_group() for _ in range(2)]

    def sums(group):
        for i in range(200):
            x, y = torch.full((5,), float(i)), torch.full((5,), float(i))
            work = dist.all_reduce(x, group=group, async_op=True)
            dist.all_reduce(y, group=group)
            work.wait()
            if not torch.equal(x, y):
                wrong.append(i)

    threads = [threading.Thread(target=sums, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_threads_with_a_group_each(pool):
    pool.run(check_other_thread)


def check_mismatch(rank, world):
    from numadist.errors import CollectiveMismatch

    group = dist.new_group()
    work = dist.all_reduce(torch.ones(2 if rank == 0 else 3), group=group, async_op=True)
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        work.wait()


def test_calls_that_differ_fail_when_waited_for(pool):
    pool.run(check_mismatch)
