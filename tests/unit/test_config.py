"""The table of variables: names, types, errors, and its page in docs."""

from pathlib import Path

import pytest

from numadist import config
from numadist.errors import ConfigError

ENV_PAGE = Path(__file__).resolve().parents[2] / "docs" / "env.md"


def test_the_page_in_docs_is_the_table():
    assert ENV_PAGE.read_text() == config.to_markdown(), (
        "docs/env.md is stale; write numadist.config.to_markdown() into it"
    )


def test_a_variable_replaces_its_default_and_foreign_names_are_ignored():
    loaded = config.load({"NUMADIST_SPIN_US": "7", "HOME": "/root"})
    assert loaded.spin_us == 7
    assert loaded.nodes == config.Config().nodes


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown variable NUMADIST_SPINUS; did you mean NUMADIST_SPIN_US"):
        config.load({"NUMADIST_SPINUS": "7"})


def test_a_value_of_the_wrong_type_is_an_error():
    with pytest.raises(ConfigError, match="NUMADIST_SPIN_US must be int, got 'long'"):
        config.load({"NUMADIST_SPIN_US": "long"})


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/var/xdg"}, Path("/var/xdg/numadist")),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, Path("/home/me/.cache/numadist")),
        ({"NUMADIST_CACHE_DIR": "~/mine", "HOME": "/home/me"}, Path("/home/me/mine")),
        ({"NUMADIST_CACHE_DIR": ""}, None),
    ],
)
def test_where_captured_graphs_are_kept(monkeypatch, environ, folder):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    known = {name: value for name, value in environ.items() if name.startswith(config.PREFIX)}
    monkeypatch.setattr(config, "_config", config.load(known))
    assert config.cache_folder() == folder
