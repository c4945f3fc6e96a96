"""The engine on rank 0: every policy gives the same tokens, and whatever ends a request frees its row."""

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import generators, hugging_face, on_all, prompts

from numadist.errors import GenerateError
from numadist.generation.engine import Engine, Policy, Request

LENGTHS = (5, 17, 1, 9, 23)
NEW = 24


def requests(*lengths, new=NEW, **options):
    return [Request(prompt, new, **options) for prompt in prompts(*lengths)]


def drive(ranks, work):
    """work(engine) on rank 0 while the others follow; its result."""

    def one(generator):
        if generator.rank != 0:
            return generator.follow()
        try:
            return work(generator)
        finally:
            generator.end()

    results = on_all(ranks, one)
    errors = [r for r in results if isinstance(r, BaseException)]
    if errors:
        raise errors[0]
    return results[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("policy", Policy)
def test_every_policy_gives_hugging_faces_tokens(policy, num_ranks):
    ranks = generators("llama", num_ranks, max_batch_size=3)

    def work(generator):
        engine = generator.engine(policy, chunk_tokens=4)
        todo = requests(*LENGTHS)
        for request in todo[:2]:
            engine.submit(request)
        for request in todo[2:]:  # the others arrive while those run
            engine.step()
            engine.submit(request)
        engine.run()
        assert engine.rows_in_use == 0
        return todo

    for request, length in zip(drive(ranks, work), LENGTHS, strict=True):
        assert request.tokens == hugging_face("llama", length, NEW)
        assert request.finish_reason == "length"
        assert len(request.token_times) == NEW


def test_chunks_interleave_with_decoding():
    (generator,) = generators("llama", 1)
    engine = generator.engine(Policy.CHUNKED, chunk_tokens=4)
    short, long = requests(1, 23)
    engine.submit(short)
    engine.step()
    engine.submit(long)
    before = len(short.tokens)
    while not long.tokens:
        engine.step()
    assert len(short.tokens) - before == 6, "23 tokens are 6 chunks of 4, with a token of the other between"
    engine.cancel_all()


def test_decode_first_reads_prompts_only_between_batches():
    (generator,) = generators("llama", 1, max_batch_size=2)
    engine = generator.engine(Policy.DECODE_FIRST)
    first, second = requests(5, 9, new=6)
    engine.submit(first)
    engine.step()
    engine.submit(second)
    while not first.done:
        assert not second.tokens
        engine.step()
    engine.run()
    assert second.tokens == hugging_face("llama", 9, NEW)[:6]


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("victim", range(3))
def test_a_cancelled_request_frees_its_row_and_disturbs_no_other(policy, victim):
    lengths = (5, 17, 9)

    def work(generator):
        engine = generator.engine(policy, chunk_tokens=4)
        todo = requests(*lengths)
        for request in todo:
            engine.submit(request)
        for _ in range(5):
            engine.step()
        used = engine.rows_in_use
        waiting = todo[victim] in engine.waiting
        engine.cancel(todo[victim])
        assert engine.rows_in_use == used - (not waiting)
        engine.cancel(todo[victim])  # again: nothing happens
        engine.run()
        assert engine.rows_in_use == 0
        return todo

    for i, request in enumerate(drive(generators("llama", 2, max_batch_size=3), work)):
        whole = hugging_face("llama", lengths[i], NEW)
        if i == victim:
            assert request.finish_reason == "cancelled"
            assert request.tokens == whole[: len(request.tokens)]
            assert len(request.tokens) < NEW
        else:
            assert request.tokens == whole, f"request {i} after {victim} was cancelled"


def test_a_request_ends_at_its_deadline():
    now = [0.0]
    (generator,) = generators("llama", 1)
    engine = Engine(generator.runner, clock=lambda: now[0])
    (slow,), (patient,) = requests(5, deadline=10.0), requests(9)
    (late,) = requests(5, deadline=3.0)
    for request in (slow, patient, late):
        engine.submit(request)
    for now[0] in (1.0, 2.0, 9.0):
        engine.step()
    assert (late.finish_reason, len(late.tokens)) == ("timeout", 2)
    assert engine.rows_in_use == 2
    now[0] = 10.0
    engine.step()
    assert (slow.finish_reason, len(slow.tokens)) == ("timeout", 3)
    assert engine.rows_in_use == 1
    engine.run()
    assert patient.tokens == hugging_face("llama", 9, NEW)
    assert engine.idle


def test_a_stop_id_frees_the_row():
    (generator,) = generators("llama", 1)
    engine = generator.engine()
    whole = hugging_face("llama", 5, NEW)
    (request,) = requests(5, stop_ids=frozenset(whole[3:4]))
    engine.submit(request)
    engine.run()
    assert request.tokens == whole[: whole.index(whole[3]) + 1]
    assert (request.finish_reason, engine.rows_in_use) == ("stop", 0)


def test_max_time_ends_generate_with_what_there_is():
    ranks = generators("llama", 2)
    outs = on_all(ranks, lambda g: g.generate(prompts(5, 9), max_new_tokens=NEW, max_time=0.0))
    assert outs == [prompts(5, 9)] * 2


def test_a_callback_that_raises_ends_all_ranks_and_they_can_generate_again():
    ranks = generators("llama", 3)

    def refuse(row, token):
        raise KeyError("enough")

    outs = on_all(ranks, lambda g: g.generate(prompts(5, 9), max_new_tokens=NEW, on_token=refuse))
    assert isinstance(outs[0], KeyError)
    assert all(isinstance(e, GenerateError) and "rank 0 stopped generating" in str(e) for e in outs[1:])
    for out in on_all(ranks, lambda g: g.generate(prompts(5), max_new_tokens=NEW, eos_token_id=())):
        assert out[0][5:] == hugging_face("llama", 5, NEW)


def test_a_callback_may_cancel_its_own_and_others_requests():
    (generator,) = generators("llama", 1)
    engine = generator.engine()
    todo = requests(5, 17, 9)

    def stop_two(token):
        if len(todo[1].tokens) == 3:
            engine.cancel(todo[0])
            engine.cancel(todo[1])

    todo[1].on_token = stop_two
    for request in todo:
        engine.submit(request)
    engine.run()
    assert [r.finish_reason for r in todo] == ["cancelled", "cancelled", "length"]
    assert [len(r.tokens) for r in todo] == [3, 3, NEW]
    assert todo[2].tokens == hugging_face("llama", 9, NEW)


def test_a_row_reused_after_a_longer_one_sees_nothing_of_it():
    """Slots keep what former rows wrote; no later row may read it."""
    (generator,) = generators("gemma3", 1, max_batch_size=1)
    for length in (23, 5, 17, 1):
        (out,) = generator.generate(prompts(length), max_new_tokens=NEW, eos_token_id=())
        assert out[length:] == hugging_face("gemma3", length, NEW)


def test_kv_tensors_start_as_zeros():
    """A masked slot has weight 0, and 0 times what is not a number is not a number."""
    (generator,) = generators("llama", 1)
    assert all(not t.any() for t in generator.runner.kv.tensors)
