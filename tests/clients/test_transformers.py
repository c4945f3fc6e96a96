"""transformers: tensor parallelism by its own plans."""

import pytest
from clients import PROGRAMS, TORCHRUN, ranks_say, result_of

pytestmark = [pytest.mark.mp, pytest.mark.slow]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral"])
def test_tensor_plan_gives_the_tokens_of_one_process(tmp_path, name):
    pytest.importorskip("transformers")
    alone = result_of(
        (*TORCHRUN, "1", str(PROGRAMS / "run.py"), "tensor_plan", name, str(tmp_path / "one")),
        "gloo",
        tmp_path,
    )
    said = {
        backend: ranks_say(
            "tensor_plan", backend, tmp_path / backend, name, str(tmp_path / f"{backend}-model")
        )
        for backend in ("gloo", "numa")
    }
    for backend in ("gloo", "numa"):
        assert said[backend]["tokens"] == alone["tokens"]
        assert said[backend]["logits"] == pytest.approx(alone["logits"], rel=1e-4, abs=1e-5)
        assert said[backend]["held"] < alone["held"]
