"""numadist generate makes rows of few different lengths where they decide what is compiled."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist.commands.generate_text import room


@pytest.mark.parametrize(
    ("tokens", "limit", "compile", "wanted"),
    [
        (133, 2048, True, 512),
        (512, 2048, True, 512),
        (513, 2048, True, 1024),
        (133, 2048, False, 133),
        (1500, 1600, True, 1600),
        (1700, 1600, True, 1700),  # the generator refuses it by this number
        (600, None, True, 1024),
    ],
)
def test_room(tokens, limit, compile, wanted):
    assert room(tokens, SimpleNamespace(max_position_embeddings=limit), compile) == wanted
