import json

import pytest

from numadist.errors import PlanError
from numadist.phases.plan import PhasePlan, PlanPair, RankPlan, load_plan


def pair(decode_threads=1):
    cpus = ((0, 2, 1, 3), (4, 6, 5, 7))
    return PlanPair(
        PhasePlan(tuple(RankPlan(c, 4) for c in cpus)),
        PhasePlan(tuple(RankPlan(c, decode_threads) for c in cpus)),
        topology_key="abc",
        model="tiny",
        measured={"decode_us": {"4": 12.5}},
        rejected=({"ranks": 1, "why": "slower"},),
    )


def test_a_plan_read_back_is_the_plan_saved(tmp_path):
    pair(2).save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == pair(2)


def test_a_process_finds_its_rank_by_its_cpus_in_any_order():
    assert pair().rank_of((7, 6, 5, 4)) == 1
    with pytest.raises(PlanError, match=r"runs on CPUs 0-1, the plan's ranks have 0-3 \| 4-7"):
        pair().rank_of((0, 1))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["version"], 2, "version is 2, this numadist reads version 1"),
        (["decode", "ranks", 0, "threads"], 5, "rank 0, decode: 5 threads on 4 CPUs"),
        (["decode", "ranks", 0, "threads"], True, "decode.ranks\\[0\\] must be"),
        (["decode", "ranks", 0, "cpus"], [0, 1, 2, 3], "differ in threads only"),
        (["decode", "ranks"], [], "2 for prefill and 0 for decode"),
        (["prefill"], None, "prefill must be an object"),
        (["prefill", "ranks", 1, "cpus"], "4-7", "prefill.ranks\\[1\\] must be"),
        (["measured"], 3, "measured must be of type dict"),
        (["speed"], 3, "unknown fields \\['speed'\\]"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(tmp_path, path, value, said):
    data = pair().to_dict()
    *parents, last = path
    place = data
    for key in parents:
        place = place[key]
    place[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=said):
        load_plan(tmp_path / "plan.json")


def test_a_cpu_has_one_rank():
    ranks = (RankPlan((0, 1), 2), RankPlan((1, 2), 2))
    with pytest.raises(PlanError, match="CPU 1 is given twice, to ranks 0 and 1"):
        PlanPair(PhasePlan(ranks), PhasePlan(ranks))


def test_no_file_and_no_json_are_errors(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        load_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        load_plan(tmp_path / "plan.json")
