"""send and receive in all their forms, and collectives in the background."""

import pytest
import torch
import torch.distributed as dist

from numadist.errors import CollectiveMismatch

pytestmark = pytest.mark.mp


def value(rank, n):
    return torch.arange(float(n)) + 1000 * rank


def check_ring(rank, world):
    right, left = (rank + 1) % world, (rank - 1) % world
    for n in (0, 1, 1000, 300000):
        # Everyone sends first: must not wait for the receive of the next rank.
        request = dist.isend(value(rank, n), right, tag=n)
        x = torch.empty(n)
        assert dist.recv(x, left, tag=n) == left
        assert torch.equal(x, value(left, n)), f"{n} elements from {left}"
        request.wait()


def test_ring_of_isend_and_recv(pool):
    pool.run(check_ring)


def check_tags(rank, world):
    if rank == 0:
        requests = [dist.isend(value(tag, 50000), 1, tag=tag) for tag in range(6)]
        for request in requests:
            request.wait()
    elif rank == 1:
        for tag in (5, 0, 3, 4, 1, 2):
            x = torch.empty(50000)
            dist.recv(x, 0, tag=tag)
            assert torch.equal(x, value(tag, 50000)), f"tag {tag}"
    dist.barrier()


def test_tags_are_received_in_any_order(pool):
    pool.run(check_tags)


def check_any_source(rank, world):
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            x = torch.empty(7)
            source = dist.recv(x)
            assert torch.equal(x, value(source, 7)), f"the data is not that of the source {source}"
            seen.add(source)
        assert seen == set(range(1, world))
    else:
        dist.send(value(rank, 7), 0)
    dist.barrier()


def test_receive_from_anyone_tells_from_whom(pool):
    pool.run(check_any_source)


def check_batch(rank, world):
    peers = [r for r in range(world) if r != rank]
    outs = {r: torch.empty(40000) for r in peers}
    ops = [dist.P2POp(dist.irecv, outs[r], r) for r in peers]
    ops += [dist.P2POp(dist.isend, value(rank, 40000), r) for r in peers]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for r in peers:
        assert torch.equal(outs[r], value(r, 40000)), f"from {r}"


def test_batch_of_sends_and_receives(pool):
    pool.run(check_batch)


def check_views(rank, world):
    if rank == 0:
        dist.send(value(0, 600).view(20, 30).t(), 1)
    elif rank == 1:
        x = torch.zeros(30, 20, 2)
        dist.recv(x[..., 0], 0)
        assert torch.equal(x[..., 0], value(0, 600).view(20, 30).t())
        assert not x[..., 1].any()
    dist.barrier()


def test_views_are_sent_and_received(pool):
    pool.run(check_views)


def check_wrong_size(rank, world):
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        with pytest.raises(
            CollectiveMismatch, match="sent 12 bytes of float32, the tensor to receive it has 16 of"
        ):
            dist.recv(torch.empty(4), 0)
    dist.barrier()


def test_wrong_size_names_both_sides_and_spares_the_group(pool):
    pool.run(check_wrong_size)


def check_wrong_dtype(rank, world):
    for dtype, name in [(torch.int32, "int32"), (torch.bool, "bool"), (torch.bfloat16, "bfloat16")]:
        n = 16 // dtype.itemsize
        if rank == 0:
            dist.send(torch.ones(4), 1)
            dist.send(torch.ones(n, dtype=dtype), 1)
        elif rank == 1:
            x = torch.zeros(n, dtype=dtype)
            wanted = f"rank 0 sent 16 bytes of float32, the tensor to receive it has 16 of {name}"
            with pytest.raises(CollectiveMismatch, match=wanted):
                dist.recv(x, 0)
            assert not x.any(), "nothing of it is stored"
            dist.recv(x, 0)
            assert x.all()
    dist.barrier()


def test_another_dtype_of_equal_bytes_names_both_sides_and_spares_the_group(pool):
    pool.run(check_wrong_dtype)


def check_many_async(rank, world):
    xs = [torch.full((1 + 5000 * i,), float(rank + i)) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    gathered = torch.empty(world * 10)
    works.append(dist.all_gather_into_tensor(gathered, torch.full((10,), float(rank)), async_op=True))
    dist.barrier()  # a blocking call comes after all that were started before it
    assert all(work.is_completed() for work in works)
    for i, x in enumerate(xs):
        assert torch.equal(x, torch.full_like(x, world * (world - 1) / 2 + world * i)), f"sum {i}"
    assert torch.equal(gathered, torch.arange(float(world)).repeat_interleave(10))


def test_background_collectives_run_in_their_order(pool):
    pool.run(check_many_async)


def check_futures(rank, world):
    strided = torch.ones(100, 2)
    future = dist.all_reduce(strided[:, 0], async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert torch.equal(future.wait(), torch.full((100,), 2.0 * world))
    assert torch.equal(strided[:, 1], torch.ones(100))


def test_future_of_a_background_collective(pool):
    pool.run(check_futures)


def check_dropped(rank, world):
    right, left = (rank + 1) % world, (rank - 1) % world
    for i in range(50):
        dist.isend(value(rank, 20000) + i, right)  # nobody keeps the work or the tensor
    for i in range(50):
        x = torch.empty(20000)
        dist.recv(x, left)
        assert torch.equal(x, value(left, 20000) + i), f"message {i}"
    dist.barrier()


def test_dropped_work_keeps_its_tensor_until_sent(pool):
    pool.run(check_dropped)


def check_groups_in_different_order(rank, world):
    first, second = dist.new_group(), dist.new_group()
    x, y = torch.ones(1000), torch.ones(1000)
    order = [(x, first), (y, second)] if rank == 0 else [(y, second), (x, first)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t, group in order]
    for work in works:
        work.wait()
    assert x[0] == y[0] == world
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


def test_groups_do_not_wait_for_each_other(pool):
    pool.run(check_groups_in_different_order)


def check_premul(rank, world):
    x = torch.full((10,), rank + 1.0)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x, torch.full((10,), world * (world + 1) / 4))
    dist.distributed_c10d._get_default_group().monitored_barrier()


def test_premultiplied_sum_and_monitored_barrier(pool):
    pool.run(check_premul)


def check_threads(rank, world):
    import threading

    groups = [dist.new_group() for _ in range(3)]
    wrong = []

    def work(number, group):
        for i in range(100):
            x = torch.full((1 + 997 * (i % 7),), float(rank + number))
            dist.all_reduce(x, group=group)
            wanted = world * (world - 1) / 2 + world * number
            if not torch.equal(x, torch.full_like(x, wanted)):
                wrong.append((number, i, x[0].item(), wanted))

    threads = [threading.Thread(target=work, args=item) for item in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    assert not wrong, f"(thread, call, seen, wanted): {wrong[:3]}"


def test_threads_use_groups_of_their_own_at_once(pool):
    pool.run(check_threads)
