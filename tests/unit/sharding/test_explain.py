"""`numadist explain` of every architecture, word for word.

After a change on purpose: `python tests/unit/sharding/test_explain.py` writes the golden texts again; read the diff.
"""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from zoo import ZOO, make

from numadist.pipeline.explain import explain

GOLDEN = Path(__file__).parent / "golden"
MAX_LINES_PER_BLOCK = 60


def text_of(name: str) -> str:
    return explain(make(name), ZOO[name].inputs(), num_ranks=2) + "\n"


@pytest.mark.parametrize("name", ZOO)
def test_explain_equals_the_golden_text(name):
    expected = (GOLDEN / f"{name}.txt").read_text()
    assert text_of(name) == expected


@pytest.mark.parametrize("name", ZOO)
def test_a_block_takes_at_most_sixty_lines(name):
    sizes: list[int] = []
    for line in (GOLDEN / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith(" "):
            sizes.append(0)
        sizes[-1:] = [sizes[-1] + 1]
    assert max(sizes) <= MAX_LINES_PER_BLOCK, sizes


if __name__ == "__main__":
    for zoo_name in ZOO:
        (GOLDEN / f"{zoo_name}.txt").write_text(text_of(zoo_name))
