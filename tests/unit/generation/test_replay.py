"""Decode steps repeated without Python: same tokens, one recording a size, errors of the call that failed."""

import ctypes
import errno
import types

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import prompts

import numadist
from numadist import models
from numadist._native import lib
from numadist._native_replay import Recording, active, address_of, call, contiguous, kept, recording
from numadist.errors import NativeError
from numadist.kernels import half, skinny
from numadist.lowering.recorded_step import MAX_RECORDINGS, ReplayedStep


def test_recorded_steps_give_the_tokens_of_those_through_python():
    model = models.build("gpt2-tiny", torch.bfloat16, n_head=3, initializer_range=0.4)
    weight = model.transformer.h[0].mlp.c_fc.weight.t()
    generator = numadist.Generator(model, max_batch_size=3, max_length=150, compile=True)
    rows = prompts(5, 17, 9)

    def tokens():
        return generator.generate(rows, max_new_tokens=70, eos_token_id=())

    first = tokens()
    step = generator.runner._forward._ready[False, True, False]
    if not (
        half.pays(torch.bfloat16) or skinny.panel_width(torch.ops.mkldnn._reorder_linear_weight(weight, 128))
    ):
        assert not isinstance(step, ReplayedStep), "linear layers of oneDNN note no calls"
        return
    # Slots grow by 64: 3 rows see 64 and then 128 of them. The first step of all compiles.
    assert (step.num_recorded, step.num_replayed) == (2, 69 - 1 - 2)
    assert tokens() == first
    assert step.num_recorded == 2
    generator.runner._forward._ready[False, True, False] = step._step
    assert tokens() == first


class NoCalls:
    def call(self, args):
        return args


def test_old_recordings_are_dropped():
    code = types.ModuleType("code")
    code.empty_strided_cpu, code.Runner = torch.empty, NoCalls
    step = ReplayedStep(lambda *inputs: kept(torch.zeros(1)), [code])
    step._recorded.update({(i,): None for i in range(MAX_RECORDINGS)})
    small = [torch.zeros(1, 1, dtype=torch.int64)] * 3
    kv = [torch.zeros(1, 1, 64, 8)]
    step(*small, kv, kv)
    assert len(step._recorded) == MAX_RECORDINGS
    assert (0,) not in step._recorded


def test_a_step_that_runs_other_code_than_was_read_is_not_recorded():
    code = types.ModuleType("code")
    code.empty_strided_cpu, code.Runner = torch.empty, NoCalls

    def step(*inputs):
        if (calls := active()) is not None:
            calls.note(1, ())
        return kept(torch.zeros(1))

    replayed = ReplayedStep(step, [code])
    small, kv = [torch.zeros(1, 1, dtype=torch.int64)] * 3, [torch.zeros(1, 1, 64, 8)]
    for _ in range(2):
        replayed(*small, kv, kv)
    assert (replayed.num_recorded, replayed.num_replayed) == (0, 0)
    assert replayed.refused == "1 calls were made, 0 are in the code: other code ran"


def filled(target, value, count):
    """A call that a recording can repeat: sum of one source."""
    source = torch.full((count,), value)
    pointers = (ctypes.c_void_p * 1)(source.data_ptr())
    return source, pointers, (0, target.data_ptr(), ctypes.addressof(pointers), 1, count, 0, 0)


def test_replayed_calls_read_what_now_stands_at_their_addresses():
    target = torch.zeros(8)
    source, _pointers, args = filled(target, 3.0, 8)
    with recording() as calls:
        calls.note(address_of(lib.nd_reduce_local), args, lambda code: None)
    assert (target == 0).all(), "noted, not made"
    calls.replay()
    assert (target == 3).all()
    source.fill_(7.0)
    calls.replay()
    assert (target == 7).all()


def test_a_call_that_fails_ends_the_replay_with_its_own_error():
    target = torch.zeros(4)
    _source, _pointers, good = filled(target, 1.0, 4)
    calls = Recording()

    def fail(code):
        raise KeyError(code)

    reduce = address_of(lib.nd_reduce_local)
    calls.note(reduce, (99, *good[1:]), fail)
    calls.note(reduce, good, fail)
    with pytest.raises(KeyError, match=str(-errno.EINVAL)):
        calls.replay()
    assert (target == 0).all(), "a call after the failed one was made"


def test_what_cannot_be_repeated_is_refused():
    calls = Recording()
    calls.note(1, (0.5,))
    assert calls.refused == "an argument of type float"
    with recording() as calls:
        contiguous(torch.zeros(4, 4).t())
    assert calls.refused == "a copy of a tensor of [4, 4]"
    calls = Recording()
    calls.note(1, (0,) * 49)
    assert calls.refused == "a call of 49 arguments"
    with pytest.raises(NativeError, match="EINVAL"):
        call(lib.nd_skinny_linear, 0, None, None, None, None, 17, 64, 64, 64, what=lambda: "17 rows")
