import json

import pytest

from numadist.commands.main import main
from numadist.commands.tune import check_idle, choose
from numadist.errors import PlanError
from numadist.phases.plan import load_plan
from numadist.topology.synthetic import synthetic
from numadist.topology.tree import build_tree
from numadist.tune.search import rank_choices, score, smallest_good, thread_steps, walk


def test_ranks_are_nodes_and_then_their_halves_while_there_are_heads():
    machine = synthetic("package:2 node:1 core:4 cpu:2")
    tree = build_tree(machine, "/nowhere")
    choices = list(rank_choices(machine, tree, num_heads=4))
    assert [[len(cpus) for cpus in ranks] for ranks in choices] == [[4, 4], [2, 2, 2, 2]]
    firsts = {core.cpus[0] for core in machine.cores}
    for ranks in choices:
        assert sorted(cpu for cpus in ranks for cpu in cpus) == sorted(firsts), (
            "every core once, one CPU each"
        )
    assert len(list(rank_choices(machine, tree, num_heads=3))) == 1
    one_core = synthetic("package:2 node:1 core:1 cpu:1")
    assert len(list(rank_choices(one_core, build_tree(one_core, "/nowhere"), num_heads=8))) == 1


def test_a_walk_ends_after_two_steps_without_gain():
    costs = {8: 10.0, 7: 9.0, 6: 8.9, 5: 9.5, 4: 1.0}
    assert walk(thread_steps(8, 1), costs.get) == {8: 10.0, 7: 9.0, 6: 8.9, 5: 9.5}
    assert thread_steps(8, 2) == [8, 6, 4, 2]


def test_a_walk_ends_when_time_is_up():
    assert walk([4, 3, 2], {4: 2.0}.get) == {4: 2.0}


def test_of_equal_thread_counts_the_smallest_is_taken():
    assert smallest_good({8: 10.2, 6: 10.0, 4: 10.29, 2: 10.31}) == 4


def trial(prefill_ms, **decode_ms):
    return {
        "prefill_ms": prefill_ms,
        "decode": {n[1:]: {"b1_ms": t, "b8_ms": 2 * t} for n, t in decode_ms.items()},
    }


def test_more_ranks_must_gain_five_percent():
    one, two = ((0, 1),), ((0,), (1,))
    plan = choose([(one, trial(10.0, n2=4.0, n1=3.99)), (two, trial(9.6, n1=4.0))])
    assert [r.threads for r in plan.prefill.ranks] == [2]
    assert [r.threads for r in plan.decode.ranks] == [1]
    assert plan.rejected[0]["ranks"] == 2
    plan = choose([(one, trial(10.0, n2=4.0)), (two, trial(8.0, n1=3.5))])
    assert [r.cpus for r in plan.decode.ranks] == [(0,), (1,)]


def test_times_count_by_their_ratios():
    assert score({"a": 1.0, "b": 100.0}) == pytest.approx(10.0)


def test_a_busy_machine_is_refused_unless_forced():
    machine = synthetic("package:1 node:1 core:4 cpu:1")
    with pytest.raises(PlanError, match=r"load average is 2\.5 on 4 cores"):
        check_idle(machine, False, 2.5)
    check_idle(machine, False, 2.0)
    check_idle(machine, True, 9.0)


def test_tune_writes_a_plan_of_what_it_measured(tmp_path, capsys):
    path = tmp_path / "plan.json"
    words = ["tune", "--model", "gpt2-tiny", "--dtype", "float32", "--layers", "1", "--force"]
    assert main([*words, "--budget", "5", "-o", str(path)]) == 0
    plan = load_plan(path)
    assert plan.model == "gpt2-tiny, float32"
    most = max(rank.threads for rank in plan.prefill.ranks)
    assert plan.measured["prefill_ms"] > 0
    assert min(plan.measured["decode"][str(most)].values()) > 0
    assert f"numarun --plan {path}" in capsys.readouterr().out
    assert json.loads(path.read_text())["topology_key"]
