"""The table of algorithms, and its override."""

import pytest

from numadist import config
from numadist.comm import algorithms


@pytest.fixture
def set_one_shot(monkeypatch):
    def set_knob(value):
        monkeypatch.setattr(config, "_config", config.load({"NUMADIST_ONE_SHOT_BYTES": str(value)}))

    return set_knob


@pytest.mark.parametrize(
    ("world", "num_bytes", "name"),
    [
        (1, 1 << 20, "copy"),
        (2, 1, "swap"),
        (2, 1 << 30, "swap"),
        (3, 32 << 10, "one-shot"),
        (3, (32 << 10) + 1, "two-shot"),
        (4, 32 << 10, "one-shot"),
        (8, 16 << 10, "one-shot"),
        (8, (16 << 10) + 1, "two-shot"),
        (64, 8 << 10, "one-shot"),
    ],
)
def test_algorithm_follows_the_table(set_one_shot, world, num_bytes, name):
    set_one_shot(-1)
    assert algorithms.algorithm(world, num_bytes) == name


def test_environment_overrides_the_table(set_one_shot):
    set_one_shot(0)
    assert algorithms.algorithm(3, 1) == "two-shot"
    set_one_shot(1 << 20)
    assert algorithms.algorithm(3, 1 << 20) == "one-shot"
