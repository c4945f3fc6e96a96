"""What a switch does to the process's threads. Each test has a thread of its own: OpenMP teams belong to one."""

import os
import threading

import pytest
import torch

import numadist
from numadist.errors import PlanError
from numadist.phases import phase as phases
from numadist.phases.phase import Phase, phase, phase_stats, switch_phase, use_plan
from numadist.phases.plan import PhasePlan, PlanPair, RankPlan


@pytest.fixture
def on_new_thread():
    """run(f): f's result, from a thread that has switched nothing before."""
    results, errors = [], []

    def run(f):
        def body():
            try:
                results.append(f())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    yield run
    use_plan(None)


def plan_of(prefill, decode):
    cpus = tuple(range(prefill))
    return PlanPair(PhasePlan((RankPlan(cpus, prefill),)), PhasePlan((RankPlan(cpus, decode),)))


def thread_ids():
    return set(os.listdir("/proc/self/task"))


def test_a_phase_sets_its_threads_and_gives_the_old_ones_back(on_new_thread):
    def body():
        torch.set_num_threads(3)
        use_plan(plan_of(4, 2))
        seen = [(numadist.current_phase(), torch.get_num_threads())]
        with phase("prefill"):
            seen.append((numadist.current_phase(), torch.get_num_threads()))
            with phase(Phase.DECODE):
                seen.append((numadist.current_phase(), torch.get_num_threads()))
            seen.append((numadist.current_phase(), torch.get_num_threads()))
        return [*seen, (numadist.current_phase(), torch.get_num_threads())]

    prefill, decode = (Phase.PREFILL, 4), (Phase.DECODE, 2)
    assert on_new_thread(body) == [(None, 3), prefill, decode, prefill, (None, 3)]


def test_threads_that_a_switch_makes_are_counted_as_the_kernel_counts_them(on_new_thread):
    def body():
        torch.set_num_threads(2)
        use_plan(plan_of(4, 2))
        switch_phase("decode")
        seen, created = thread_ids(), 0
        before = phase_stats().threads_created
        for _ in range(20):
            switch_phase("prefill")
            created += len(thread_ids() - seen)
            seen = thread_ids()
            switch_phase("decode")
        return created, phase_stats().threads_created - before

    by_kernel, by_us = on_new_thread(body)
    # Threads that end late keep their ids a while; new ones never take them.
    assert by_us == by_kernel, f"{by_us} threads counted, {by_kernel} new ids"
    if phase_stats().runtime.startswith("libgomp"):
        assert by_us == 20 * 2, "libgomp makes two threads anew each time the team grows from 2 to 4"
    else:
        assert by_us <= 2, "hot teams keep their threads"


def test_a_thousand_switches_between_one_and_two_threads_make_and_end_no_thread(on_new_thread):
    x, w = torch.randn(64, 512), torch.randn(512, 512)

    def body():
        torch.set_num_threads(2)
        use_plan(plan_of(2, 1))
        with phase("prefill"):
            wanted = x @ w
            ids, before = thread_ids(), phase_stats()
            for _ in range(500):
                for name in ("decode", "prefill"):
                    switch_phase(name)
            after = phase_stats()
            return thread_ids() ^ ids, after, before, torch.equal(x @ w, wanted)

    changed, after, before, same = on_new_thread(body)
    assert not changed, f"threads that came or went: {changed}"
    assert (after.switches - before.switches, after.threads_created - before.threads_created) == (1000, 0)
    assert same, "the same layer with the same threads has other bits"


def test_without_a_plan_a_phase_has_a_name_and_no_effect(on_new_thread):
    def body():
        threads = torch.get_num_threads()
        with phase("decode"):
            return numadist.current_phase(), torch.get_num_threads() - threads

    use_plan(None)
    assert on_new_thread(body) == (Phase.DECODE, 0)


def test_a_wrong_name_and_a_wrong_rank_are_errors():
    with pytest.raises(PlanError, match="no phase 'train'; there are prefill, decode"):
        switch_phase("train")
    with pytest.raises(PlanError, match="rank 1 of a plan for 1 ranks"):
        use_plan(plan_of(2, 1), rank=1)


def test_the_plan_that_numarun_names_is_read_at_the_first_switch(on_new_thread, tmp_path, monkeypatch):
    plan_of(3, 2).save(tmp_path / "plan.json")
    settings = numadist.config.Config(plan=str(tmp_path / "plan.json"), cpus="0-2")
    monkeypatch.setattr(phases, "config", lambda: settings)
    monkeypatch.setattr(phases, "_plan_read", False)

    def body():
        with phase("decode"):
            return torch.get_num_threads()

    assert on_new_thread(body) == 2
