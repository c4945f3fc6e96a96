"""transformers' Trainer and accelerate: the same losses over numa as over gloo."""

import pytest
from clients import over_both

pytestmark = [pytest.mark.mp, pytest.mark.slow]

WAYS = pytest.mark.parametrize("way", [(), ("fsdp",)], ids=["ddp", "fsdp2"])


@WAYS
def test_transformers_trainer(tmp_path, way):
    pytest.importorskip("accelerate")
    losses = over_both("trainer.py", tmp_path, str(tmp_path), *way)
    assert len(losses["numa"]) == 6
    assert losses["numa"] == pytest.approx(losses["gloo"], rel=1e-5)


@WAYS
def test_accelerate(tmp_path, way):
    pytest.importorskip("accelerate")
    said = over_both("accelerated.py", tmp_path, *way)
    assert said["numa"]["ranks"] == [0, 1]
    assert said["numa"]["losses"] == pytest.approx(said["gloo"]["losses"], rel=1e-5)
    assert said["numa"]["losses"][-1] < said["numa"]["losses"][0]
