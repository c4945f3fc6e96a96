"""torch's own ways to train in parallel, as their users write them: the same losses over numa as over gloo."""

import pytest
from clients import ranks_say

pytestmark = [pytest.mark.mp, pytest.mark.slow]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("options", [(), ("--compile",)], ids=["eager", "compiled"])
def test_fsdp2_with_tensor_parallelism(tmp_path, num_ranks, options):
    losses = {
        backend: ranks_say("fsdp_tensor_parallel", backend, tmp_path / backend, *options, num_ranks=num_ranks)
        for backend in ("gloo", "numa")
    }
    assert losses["numa"] == pytest.approx(losses["gloo"], rel=1e-5)
    assert losses["numa"][-1] < losses["numa"][0]


def test_checkpoints_are_saved_and_loaded(tmp_path):
    values = {
        backend: ranks_say("checkpoint", backend, tmp_path / backend, str(tmp_path / backend / "saved"))
        for backend in ("gloo", "numa")
    }
    assert values["numa"] == values["gloo"]


def test_pipelining(tmp_path):
    losses = {backend: ranks_say("pipelined", backend, tmp_path / backend) for backend in ("gloo", "numa")}
    assert losses["numa"] == pytest.approx(losses["gloo"], rel=1e-6)
    assert losses["numa"][2] < losses["numa"][0]
