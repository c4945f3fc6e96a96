"""Lightning's Trainer: the same losses over numa as over gloo."""

import pytest
from clients import over_both

pytestmark = [pytest.mark.mp, pytest.mark.slow]


@pytest.mark.parametrize("way", [(), ("fsdp",)], ids=["ddp", "fsdp2"])
def test_lightning(tmp_path, way):
    pytest.importorskip("lightning")
    losses = over_both("lightning_fit.py", tmp_path, str(tmp_path), *way)
    assert len(losses["numa"]) == 6
    assert losses["numa"] == pytest.approx(losses["gloo"], rel=1e-5)
