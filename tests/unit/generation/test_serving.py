"""The serving measure: seeded load, figures from times, and a run to its end."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from rank_threads import generators

from numadist.generation.engine import Policy, Request
from numadist.generation.serving import Targets, Unloaded, Workload, calibrate, percentile, serve, summary

LOAD = Workload(
    num_requests=400,
    rate=5.0,
    prompt_median=40,
    output_median=10,
    sigma=0.6,
    vocabulary=512,
    max_tokens=120,
)


def test_the_same_seed_gives_the_same_requests():
    def plain(workload):
        return [(arrival, r.prompt, r.max_new_tokens) for arrival, r in workload.requests()]

    assert plain(LOAD) == plain(LOAD)
    assert plain(LOAD) != plain(dataclasses.replace(LOAD, seed=1))


def test_arrivals_and_lengths_are_as_asked():
    todo = LOAD.requests()
    assert len(todo) == 400
    assert len(todo) / todo[-1][0] == pytest.approx(5.0, rel=0.15)
    prompts = [len(r.prompt) for _, r in todo]
    assert np.median(prompts) == pytest.approx(40, rel=0.15)
    assert np.median([r.max_new_tokens for _, r in todo]) == pytest.approx(10, rel=0.2)
    assert all(len(r.prompt) + r.max_new_tokens <= 120 and r.max_new_tokens >= 2 for _, r in todo)
    assert np.std(np.log(prompts)) == pytest.approx(0.6, rel=0.2)


def test_faster_arrivals_bring_the_same_prompts():
    slow, fast = LOAD.requests(), dataclasses.replace(LOAD, rate=50.0).requests()
    assert [r.prompt for _, r in slow] == [r.prompt for _, r in fast]
    assert slow[-1][0] == pytest.approx(10 * fast[-1][0])


@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentile_equals_numpys(percent, count):
    values = np.random.default_rng(count).random(count).tolist()
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_figures_come_from_the_times_of_tokens():
    fast = Request([1, 2], 3, arrival=10.0, tokens=[1, 2, 3], token_times=[10.1, 10.15, 10.2])
    slow = Request([1], 2, arrival=11.0, tokens=[1, 2], token_times=[11.5, 11.9])
    row = summary([fast, slow], seconds=4.0, targets=Targets(ttft_ms=600, tpot_ms=100))
    assert row["p50_ttft_ms"] == pytest.approx((100 + 500) / 2)
    assert row["mean_tpot_ms"] == pytest.approx((50 + 400) / 2)
    assert row["mean_itl_ms"] == pytest.approx((50 + 50 + 400) / 3)
    assert row["p99_e2el_ms"] == pytest.approx(200 + 0.99 * 700)
    assert row["request_goodput"] == pytest.approx(1 / 4), "the slow one missed its tpot"
    assert row["attainment"] == 0.5
    assert row["output_throughput"] == pytest.approx(5 / 4)
    assert (row["completed"], row["total_input_tokens"], row["total_output_tokens"]) == (2, 3, 5)


@pytest.mark.parametrize("policy", Policy)
def test_a_load_is_served_to_its_last_token(policy):
    (generator,) = generators("llama", 1, max_batch_size=3, max_length=120)
    engine = generator.engine(policy, chunk_tokens=16)
    load = dataclasses.replace(LOAD, num_requests=8, rate=100.0)
    requests, seconds = serve(engine, load)
    assert [len(r.tokens) for r in requests] == [r.max_new_tokens for _, r in load.requests()]
    assert all(r.token_times[0] >= r.arrival for r in requests)
    assert seconds >= load.requests()[-1][0]
    assert (engine.rows_in_use, engine.idle) == (0, True)


def test_calibration_leaves_the_engine_idle():
    (generator,) = generators("llama", 1, max_batch_size=3, max_length=120)
    engine = generator.engine()
    alone = calibrate(engine, LOAD, steps=3)
    assert min(alone.prefill_s, alone.step_s, alone.full_step_s) > 0
    assert engine.idle


def test_capacity_is_the_rate_that_keeps_the_engine_busy():
    load = dataclasses.replace(LOAD, sigma=0.0)
    assert Unloaded(0.1, 0.01, 0.02).capacity(load, max_rows=4) == pytest.approx(1 / (0.1 + 10 * 0.02 / 4))
