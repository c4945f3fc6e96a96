"""The harness's arithmetic and reports, without running a model."""

import json

import pytest

from numadist.compare import report, variants
from numadist.compare.noise import Usage, between
from numadist.compare.rounds import Case, Row
from numadist.compare.statistics import Timing, bootstrap_interval, geometric_mean, ratio
from numadist.compare.variants import BASELINE, REFERENCE, VARIANTS, chosen, missing
from numadist.errors import ConfigError


def row(variant, rounds_ms):
    return Row(variant, Timing(rounds_ms), error=1e-6, first_s=1.0)


def case(batch=1, seq=128, ours=(8.0, 8.1, 7.9, 8.0, 8.2)):
    times = {REFERENCE: [20.0] * 5, BASELINE: [10.0, 10.2, 9.9, 10.1, 10.0], "ranks": list(ours)}
    return Case("m", batch, seq, [row(name, rounds) for name, rounds in times.items()])


def test_ratios_are_taken_inside_a_round():
    """The machine became twice as slow in the middle: the ratio does not see it, the medians would."""
    speed = ratio(Timing([10, 10, 20, 20, 20]), Timing([5, 5, 10, 10, 10]))
    assert (speed.median, speed.low, speed.high, speed.verdict) == (2.0, 2.0, 2.0, "faster")


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([8, 8, 8, 8, 8], "faster"), ([12, 12, 12, 12, 12], "slower"), ([8, 12, 8, 12, 10], "tie")],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(ours, verdict):
    assert ratio(Timing([10.0] * 5), Timing([float(x) for x in ours])).verdict == verdict


def test_bootstrap_interval_is_the_same_for_the_same_values_and_holds_the_median():
    values = [1.1, 1.3, 0.9, 1.2, 1.0, 1.25]
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    assert min(values) <= low <= 1.15 <= high <= max(values)


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_noise_is_what_others_did():
    before, after = Usage(busy_s=100.0, steal_s=1.0), Usage(busy_s=106.0, steal_s=1.2)
    noise = between(before, after, own_s=4.0, wall_s=2.0, num_cpus=2)
    assert noise.foreign_cores == pytest.approx(1.0)
    assert noise.steal == pytest.approx(0.05)


def test_baseline_and_reference_are_always_measured_and_unknown_names_are_errors():
    assert [v.name for v in chosen(["ranks"], {})] == [REFERENCE, BASELINE, "ranks"]
    on_request = {"ranks-auto", "ranks-sequence"}
    assert [v.name for v in chosen(None, {})] == [name for name in VARIANTS if name not in on_request]
    with pytest.raises(ConfigError, match="unknown variant rank; known: eager"):
        chosen(["rank"], {})


def test_a_variant_whose_package_is_missing_says_so(monkeypatch):
    monkeypatch.setattr(variants.importlib.util, "find_spec", lambda name: None)
    absent = missing()
    assert set(absent) == {"openvino", "onnxruntime", "llama.cpp"}
    assert not {v.name for v in chosen(None, absent)} & set(absent)
    with pytest.raises(ConfigError, match="variant openvino needs a package: pip install openvino"):
        chosen(["openvino"], absent)


def test_llama_cpp_is_looked_for_in_its_own_interpreter(tmp_path):
    """An interpreter that has every package, and one that does not run."""
    has_all = tmp_path / "python"
    has_all.write_text("#!/bin/sh\nexit 0\n")
    has_all.chmod(0o755)
    assert "llama.cpp" not in missing(str(has_all))
    has_all.write_text("#!/bin/sh\nexit 1\n")
    assert f"pip install llama-cpp-python for {has_all}, or name" in missing(str(has_all))["llama.cpp"]
    with pytest.raises(ConfigError, match="cannot run the interpreter /nowhere/python"):
        missing("/nowhere/python")


def test_the_table_the_json_and_the_plot_say_the_same(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    cases = [case(), case(seq=512, ours=(12.0, 12.5, 12.1, 12.2, 12.0))]
    cases[0].failed["ranks-gloo"] = "wrong answer: logits differ by 3.0e-01 of their scale"
    cases[0].left_out["onnxruntime"] = "no bfloat16 kernels"
    text = "\n".join([*report.case_lines(cases[0]), *report.summary_lines(cases)])
    assert "1.25 [" in text
    assert "no result: wrong answer" in text
    assert "onnxruntime          no row: no bfloat16 kernels" in text
    assert "ranks                geometric mean 1.02, worst 0.83, slower in 1 of 2" in text
    rows = report.to_json(cases, {"dtype": "float32"})
    report.write_json(str(tmp_path / "out.json"), rows)
    again = json.loads((tmp_path / "out.json").read_text())
    (ours,) = [r for r in again if r["variant"] == "ranks" and r["seq"] == 128]
    assert ours["speed_up"] == pytest.approx(1.25, abs=0.01)
    assert ours["verdict"] == "faster"
    assert [r["failed"] for r in again if "failed" in r] == [cases[0].failed["ranks-gloo"]]
    assert [r["variant"] for r in again if "left_out" in r] == ["onnxruntime"]
    report.plot(str(tmp_path / "out.png"), cases, "m")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_cost_model_chose_is_held_against_the_best_it_could_choose():
    good, bad = case(seq=128), case(seq=512, ours=[20.0] * 5)
    good.rows.append(row("ranks-auto", [8.0, 8.1, 7.9, 8.0, 8.2]))  # as ranks, the better one here
    bad.rows.append(row("ranks-auto", [12.5, 12.75, 12.375, 12.625, 12.5]))  # compile is the better one here
    assert report.auto_lines([good])[0].endswith("worst 1.00 [1.00-1.00], against ranks on m at 1 x 128")
    assert report.auto_lines([good, bad])[0].endswith(
        "worst 0.80 [0.80-0.80], against compile on m at 1 x 512"
    )
    assert report.auto_lines([case()]) == []
