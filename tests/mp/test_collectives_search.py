"""Random programs over every public collective, layout, dtype, kind of tensor and way to wait, against gloo.

The truth is what gloo gives for plain copies of the same tensors. What gloo refuses we may refuse too, in a CommError.
No program may hang: a pool's answer has a deadline, and so has every group.
"""

import contextlib
import traceback

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

# About a minute for two and three ranks together.
EXAMPLES, NIGHTLY_EXAMPLES = 1500, 50_000

APIS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "ring",
]
LAYOUTS = ["contiguous", "transposed", "sliced", "channels_last", "misaligned", "zero-size", "0-dim"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool", "complex64"]
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"]
GUARDS = ["plain", "leaf", "requires grad", "inference"]
WAYS = ["sync", "async", "async, no wait", "future", "callback", "nested"]
STEPS = st.tuples(
    st.sampled_from(APIS),
    st.sampled_from(LAYOUTS),
    st.sampled_from([*LAYOUTS, "expanded"]),  # of what is only read
    st.sampled_from(DTYPES),
    st.sampled_from(OPS),
    st.sampled_from(GUARDS),
    st.sampled_from(WAYS),
    st.integers(0, 1),  # group
    st.integers(0, 1000),  # seed
)


def laid_out(layout, shape, dtype):
    """A tensor of zeros of this shape whose memory is in this order."""
    rows, cols = (*shape, 1, 1)[:2]
    if layout == "transposed":
        return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
    if layout == "sliced" and shape:
        return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    if layout == "channels_last" and len(shape) == 4:
        return torch.zeros(shape, dtype=dtype).to(memory_format=torch.channels_last)
    if layout == "misaligned" and len(shape) == 2 and rows and dtype != torch.bool:
        raw = bytearray(1 + rows * cols * dtype.itemsize)
        return torch.frombuffer(raw, dtype=dtype, offset=1).view(shape)
    return torch.zeros(shape, dtype=dtype)


def shape_of(layout, world):
    shapes = {"zero-size": (0, 3), "0-dim": (), "channels_last": (world, 3, 2, 2)}
    return shapes.get(layout, (2 * world, 5))


def made(layout, shape, dtype, guard, seed):
    """A tensor of small whole numbers."""
    with torch.inference_mode() if guard == "inference" else contextlib.nullcontext():
        values = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        if layout == "expanded" and shape and shape[0]:
            t = values[:1].expand(shape)
        else:
            t = laid_out(layout, shape, dtype)
            t.copy_(values)
    differentiable = dtype.is_floating_point or dtype.is_complex
    if guard == "leaf" and differentiable:
        return t.requires_grad_()
    if guard == "requires grad" and differentiable:
        return t.requires_grad_().view_as(t)
    return t


class Step:
    """One call: its tensors, and how it is made on a group."""

    def __init__(self, rank, world, step):
        self.api, layout, read, dtype, self.op, guard, self.way, self.group, seed = step
        self.rank, self.world, self.root = rank, world, seed % world
        shape, dtype = shape_of(layout, world), getattr(torch, dtype)
        if read in ("zero-size", "0-dim", "channels_last"):  # layouts of other shapes
            read = layout
        many = (world, *shape) if not shape else (world * shape[0], *shape[1:])

        def new(of_shape, how, key):
            return made(how, of_shape, dtype, guard, 100 * seed + 10 * key + rank)

        self.written, self.reads = [], []
        writes_parts = self.api in ("all_gather", "all_to_all") or (
            self.api == "gather" and rank == self.root
        )
        reads_parts = self.api in ("reduce_scatter", "all_to_all") or (
            self.api == "scatter" and rank == self.root
        )
        if writes_parts:
            self.written = [new(shape, layout, r) for r in range(world)]
        elif self.api != "gather":
            self.written = [new(many if self.api == "all_gather_into_tensor" else shape, layout, 0)]
        if reads_parts:
            self.reads = [new(shape, read, 4 + r) for r in range(world)]
        elif self.api not in ("all_reduce", "reduce", "broadcast", "scatter"):
            self.reads = [new(many if self.api == "reduce_scatter_tensor" else shape, read, 4)]

    def plain(self):
        """The same with plain copies of the tensors."""
        copy = object.__new__(Step)
        vars(copy).update(vars(self))
        for name in ("written", "reads"):
            setattr(copy, name, [plain(t) for t in getattr(self, name)])
        return copy

    def start(self, group, in_background):
        """The work, or None of a call that is done."""
        outs, ins, root = self.written, self.reads, dist.get_global_rank(group, self.root)
        more = {"group": group, "async_op": in_background}
        op = getattr(ReduceOp, self.op)
        calls = {
            "all_reduce": lambda: dist.all_reduce(outs[0], op, **more),
            "reduce": lambda: dist.reduce(outs[0], root, op, **more),
            "broadcast": lambda: dist.broadcast(outs[0], root, **more),
            "all_gather": lambda: dist.all_gather(outs, ins[0], **more),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(outs[0], ins[0], **more),
            "reduce_scatter": lambda: dist.reduce_scatter(outs[0], ins, op, **more),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(outs[0], ins[0], op, **more),
            "gather": lambda: dist.gather(ins[0], outs or None, root, **more),
            "scatter": lambda: dist.scatter(outs[0], ins or None, root, **more),
            "all_to_all": lambda: dist.all_to_all(outs, ins, **more),
            "all_to_all_single": lambda: dist.all_to_all_single(outs[0], ins[0], **more),
            "ring": lambda: self._ring(group),
        }
        return calls[self.api]()

    def _ring(self, group):
        right, left = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        sent = dist.isend(self.reads[0], right, group=group)
        dist.recv(self.written[0], left, group=group)
        sent.wait()

    def results(self):
        if self.api == "reduce" and self.rank != self.root:
            return []  # undefined there
        return [plain(t) for t in self.written]


def plain(t):
    return torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())


_groups = {}


def groups_of(backend):
    """Two that are used at once, and one for calls inside callbacks."""
    if backend not in _groups:
        _groups[backend] = [dist.new_group(backend=backend) for _ in range(3)]
    return _groups[backend]


def on_gloo(step):
    """Results of plain copies, or why gloo refuses them."""
    if step.api == "all_to_all_single" and not step.reads[0].dim():
        return ValueError("gloo takes a number that does not split, and leaves the result as it was")
    copy, group = step.plain(), groups_of("gloo")[step.group]
    try:
        if "reduce_scatter" in step.api:  # gloo's own ends the process for some dtypes and ops (torch 2.13)
            whole = torch.cat([t.reshape(-1) for t in copy.reads])
            dist.all_reduce(whole, getattr(ReduceOp, step.op), group=group)
            return [whole.chunk(step.world)[step.rank].view(copy.written[0].shape)]
        copy.start(group, False)
    except (RuntimeError, ValueError, TypeError) as error:
        return error
    return copy.results()


def begin(step, may_nest):
    """Make a call on our groups; what to call for its end."""
    groups = groups_of("numa")
    work = step.start(groups[step.group], step.way != "sync")
    if work is None:
        return lambda: None
    if step.way == "future":
        return work.get_future().wait
    if step.way == "callback":
        return work.get_future().then(lambda future: len(future.value())).wait
    if step.way == "nested" and may_nest:

        def inner(future):
            x = torch.ones(3)
            dist.all_reduce(x, group=groups[2], async_op=True).get_future().wait()
            assert x[0] == step.world

        return work.get_future().then(inner).wait
    return work.wait


def rounded_alike(ours, other):
    """Means of three ranks are rounded, and gloo divides in other places."""
    return torch.allclose(ours.cdouble(), other.cdouble(), rtol=2 * torch.finfo(ours.dtype).eps)


def run_program(rank, world, steps):
    """The first difference between our groups and gloo's, or None."""
    from numadist.errors import CommError

    made_steps = [Step(rank, world, step) for step in steps]
    wanted = [on_gloo(step) for step in made_steps]
    ends, errors, nested = [], {}, False
    for i, step in enumerate(made_steps):
        may_nest = step.way == "nested" and not nested
        try:
            ends.append((i, begin(step, may_nest)))
            nested |= may_nest
        except (CommError, ValueError) as error:  # ValueError: torch's own, whatever the backend
            errors[i] = error
    for i, end in reversed(ends):
        try:
            end()
        except RuntimeError as error:
            if "CommError" not in repr(error):  # a callback's error has its name in the text
                raise
            errors[i] = error
    for i, (step, theirs) in enumerate(zip(made_steps, wanted, strict=True)):
        if isinstance(theirs, Exception):
            continue
        if i in errors:
            return f"step {i} {steps[i]}: {errors[i]!r}, gloo takes it"
        for ours, other in zip(step.results(), theirs, strict=True):
            if not (torch.equal(ours, other) or (step.op == "AVG" and rounded_alike(ours, other))):
                return f"step {i} {steps[i]}: {ours.flatten()[:8]}, gloo {other.flatten()[:8]}"
    return None


def run_reported(rank, world, steps):
    """An exception as a text: the pool would leave the other ranks' answers unread."""
    try:
        return run_program(rank, world, steps)
    except Exception:
        return traceback.format_exc()


def search(pool, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(steps=st.lists(STEPS, min_size=1, max_size=8))
    def check(steps):
        differences = pool.run(run_reported, steps)
        assert differences == [None] * pool.world, f"{differences}"

    check()


@pytest.mark.mp
def test_random_programs_equal_gloo(pool):
    search(pool, EXAMPLES)


@pytest.mark.nightly
def test_many_random_programs_equal_gloo(pool):
    search(pool, NIGHTLY_EXAMPLES)
