"""What programs written for gloo do with a group: nested futures, second signatures, leaves of every layout."""

import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

pytestmark = pytest.mark.mp


def check_nested_futures(rank, world):
    x, y, z = torch.ones(4), torch.ones(4), torch.ones(4)

    def inner(future):
        return dist.all_reduce(z, async_op=True).get_future().wait()[0] + future.value()[0]

    def outer(future):
        return dist.all_reduce(y, async_op=True).get_future().then(inner).wait() + future.value()[0]

    future = dist.all_reduce(x, async_op=True).get_future().then(outer)
    assert torch.equal(future.wait(), torch.full((4,), 3.0 * world))


def test_a_callback_may_wait_for_another_collective(pool):
    """Two deep: gloo itself, with its two threads, waits for ever."""
    pool.run(check_nested_futures)


def check_failing_inner(rank, world):
    from numadist.errors import CollectiveTimeout

    alone = dist.new_group(timeout=timedelta(seconds=1))

    def waits_for_nobody(future):
        return dist.all_reduce(torch.ones(1), group=alone, async_op=True).get_future().wait()

    x = torch.ones(4)
    future = dist.all_reduce(x, async_op=True).get_future()
    if rank == 0:  # the others never make the inner call
        with pytest.raises(RuntimeError, match="not arrived within 1 s"):
            future.then(waits_for_nobody).wait()
        with pytest.raises(CollectiveTimeout):
            dist.barrier(alone)
    dist.barrier()


def test_a_wait_inside_a_callback_ends_with_the_groups_timeout(pool):
    pool.run(check_failing_inner)


def check_hook(rank, world):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    norms = dist.new_group()

    def hook(state, bucket):
        def then(future):
            norm = future.value()[0].norm()
            dist.all_reduce(norm, group=norms, async_op=True).get_future().wait()
            return future.value()[0] / world

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(then)

    model.register_comm_hook(None, hook)
    model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    assert torch.equal(model.module.bias.grad, torch.full((4,), 2.0))
    dist.destroy_process_group(norms)


def test_a_ddp_hook_may_wait_for_another_collective(group):
    group.run(check_hook)


def check_value_after_wait(rank, world):
    for _ in range(50):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        work.wait()
        assert torch.equal(future.value()[0], torch.full((3,), float(world)))


def test_a_future_has_its_value_once_the_work_was_waited_for(pool):
    pool.run(check_value_after_wait)


def check_second_signatures(rank, world):
    pg, soon = dist.distributed_c10d._get_default_group(), timedelta(seconds=20)
    mine, everyone = torch.tensor([rank + 1.0]), torch.arange(1.0, world + 1)

    def results():
        yield "allreduce", (x := mine.clone()), pg.allreduce(x, ReduceOp.MAX), world
        yield "allreduce tensor=", (x := mine.clone()), pg.allreduce(tensor=x), everyone.sum()
        yield "allreduce op=", (x := mine.clone()), pg.allreduce([x], op=ReduceOp.MAX, timeout=soon), world
        yield "broadcast", (x := mine.clone()), pg.broadcast(x, 1), 2
        yield "broadcast root=", (x := mine.clone()), pg.broadcast(tensor=x, root=1, timeout=soon), 2
        total = everyone.prod() if rank == 1 else None
        yield "reduce", (x := mine.clone()), pg.reduce(x, 1, ReduceOp.PRODUCT), total
        outs = list(torch.zeros(world, 1).unbind())
        yield "allgather", outs[1], pg.allgather(outs, mine), 2
        outs = list(torch.zeros(world, 1).unbind()) if rank == 0 else []
        yield "gather", outs[1] if outs else mine, pg.gather(outs, mine, 0), 2 if outs else None
        parts = [torch.full((1,), 7.0 + i) for i in range(world)] if rank == 0 else []
        yield "scatter", (x := torch.zeros(1)), pg.scatter(x, parts, root=0), 7 + rank
        parts = [torch.full((1,), 1.0 + i) for i in range(world)]
        yield "reduce_scatter", (x := torch.zeros(1)), pg.reduce_scatter(x, parts, ReduceOp.MAX), rank + 1
        out = torch.zeros(world)
        yield "alltoall_base", out[1:2], pg.alltoall_base(out, everyone + 10 * rank, [], [], soon), 11 + rank
        yield "barrier", mine, pg.barrier(soon), None
        yield "barrier timeout=", mine, pg.barrier(timeout=soon), None

    for name, seen, work, wanted in results():
        work.wait()
        assert wanted is None or seen.item() == wanted, f"{name}: {seen} instead of {wanted}"


def test_both_of_torchs_signatures_are_taken(group):
    group.run(check_second_signatures)


def check_wrong_arguments(rank, world):
    pg = dist.distributed_c10d._get_default_group()
    with pytest.raises(TypeError, match=r"allreduce\(\) needs tensors or tensor"):
        pg.allreduce(op=ReduceOp.MAX)
    with pytest.raises(TypeError, match=r"allreduce\(\) takes no argument \['rooot'\]"):
        pg.allreduce(torch.ones(1), rooot=3)
    dist.barrier()


def test_arguments_of_no_signature_are_named(numa_pair):
    numa_pair.run(check_wrong_arguments)


def check_join(rank, world):
    from torch.nn.parallel import DistributedDataParallel

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.ones(3, 4) + rank).square().mean().backward()
            optimizer.step()
    got = [None] * world
    dist.all_gather_object(got, model.module.used.weight.detach())
    assert all(torch.equal(got[0], g) for g in got)


def test_ddp_joins_ranks_of_uneven_inputs(group):
    group.run(check_join)


def leaves():
    """Name and a tensor of ones that autograd guards, or that is not in order."""
    conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last).weight
    conv.data.fill_(1)
    with torch.inference_mode():
        inference, turned = torch.ones(3, 4), torch.ones(3, 4).t()
    yield "leaf", torch.nn.Parameter(torch.ones(4, 6))
    yield "transposed leaf", torch.nn.Parameter(torch.ones(4, 6).t())
    yield "channels_last leaf", conv
    yield "sliced leaf", torch.ones(6, 6)[:, ::2].requires_grad_()
    yield "inference tensor", inference
    yield "transposed inference tensor", turned


def check_leaves(rank, world):
    def all_reduce(t):
        dist.all_reduce(t)
        return world

    def premultiplied(t):
        dist.all_reduce(t, dist._make_nccl_premul_sum(0.5))
        return world / 2

    def in_background(t):
        dist.all_reduce(t, async_op=True).get_future().wait()
        return world

    def gathered(t):
        outs = [t if r == 0 else torch.zeros_like(t) for r in range(world)]
        dist.all_gather(outs, torch.full(t.shape, rank + 3.0))
        return 3

    def received(t):
        if rank == 0:
            dist.send(torch.full(t.shape, 5.0), 1)
        elif rank == 1:
            dist.recv(t, 0)
            return 5
        return 1

    for call in (all_reduce, premultiplied, in_background, gathered, received):
        for name, t in leaves():
            wanted = torch.full(t.shape, float(call(t)))
            assert torch.equal(t.detach(), wanted), f"{call.__name__} of a {name}: {t}"
            assert t.grad_fn is None


def test_results_come_into_leaves_and_inference_tensors_of_every_layout(pool):
    pool.run(check_leaves)


def check_overlapping(rank, world):
    from numadist.errors import CommError

    for call in (dist.all_reduce, lambda t: dist.all_reduce(t, async_op=True).wait()):
        with pytest.raises(CommError, match="several elements of it share memory"):
            call(torch.zeros(1).expand(4))
    dist.barrier()


def test_a_result_whose_elements_share_memory_is_refused(numa_pair):
    numa_pair.run(check_overlapping)


def check_devices(rank, world):
    import torch.distributed.checkpoint as checkpoint

    pg = dist.distributed_c10d._get_default_group()
    assert pg._device_types == [torch.device("cpu")]
    assert pg._get_backend(torch.device("cpu")).name() == "numa"
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    saved = {"a": torch.arange(3.0)}
    checkpoint.async_save(saved, checkpoint_id=folder[0]).result()
    loaded = {"a": torch.zeros(3)}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    assert torch.equal(loaded["a"], saved["a"])


def test_checkpoints_are_saved_in_the_background(numa_pair):
    numa_pair.run(check_devices)
