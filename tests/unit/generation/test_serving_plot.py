"""The picture of a sweep shows the rows' own figures."""

import sys

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

from matplotlib import pyplot

from numadist.errors import GenerateError
from numadist.generation.plot import PANELS, draw, plot

TARGETS = {"ttft_ms": 500.0, "tpot_ms": 40.0}
POLICIES = ["prefill-first", "chunked"]


def row(policy, rate):
    """Every figure another number."""
    base = 100 * POLICIES.index(policy) + rate
    figures = [key for panel in PANELS for key in panel.styles]
    return {"policy": policy, "rate": rate, **{key: base + 1000 * i for i, key in enumerate(figures)}}


ROWS = [row(policy, rate) for rate in (4.0, 1.0, 2.5) for policy in POLICIES]


def drawn(axis):
    return [tuple(zip(*line.get_data(), strict=True)) for line in axis.lines]


def test_every_panel_has_a_line_a_policy_over_growing_rates():
    figure = draw(ROWS, TARGETS, "a title")
    assert figure.get_suptitle() == "a title"
    for axis, panel in zip(figure.axes, PANELS, strict=True):
        assert axis.get_ylabel() == panel.label
        expected = [
            tuple((rate, row(policy, rate)[key]) for rate in (1.0, 2.5, 4.0))
            for policy in POLICIES
            for key in panel.styles
        ]
        assert drawn(axis)[: len(expected)] == expected
        assert [text.get_text() for text in axis.get_legend().texts][:2] == POLICIES
    levels = [axis.lines[-1].get_ydata()[0] for axis in figure.axes[1:]]
    assert levels == [TARGETS["ttft_ms"], TARGETS["tpot_ms"]]
    pyplot.close(figure)


def test_one_rate_is_enough_for_a_picture(tmp_path):
    plot(str(tmp_path / "out.png"), [row(policy, 3.0) for policy in POLICIES], TARGETS, "one rate")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GenerateError, match=r"pip install 'numadist\[plot\]'"):
        plot(str(tmp_path / "out.png"), ROWS, TARGETS, "")
