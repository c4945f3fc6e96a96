"""DeepSpeed on CPUs: automatic tensor parallelism and the three stages of ZeRO."""

import pytest
from clients import PROGRAMS, TORCHRUN, Failed, result_of

pytestmark = [pytest.mark.mp, pytest.mark.slow]

# Without it DeepSpeed builds an operator of its own for sums; with it, it takes torch's groups.
PLAIN = {"DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize("what", ["tp", "1", "2", "3"], ids=["tensor-parallel", "zero1", "zero2", "zero3"])
def test_deepspeed_says_the_same_over_numa(tmp_path, what):
    pytest.importorskip("deepspeed")
    command = (*TORCHRUN, "2", str(PROGRAMS / "deepspeed_zero.py"), what)
    try:
        theirs = result_of(command, "gloo", tmp_path / "gloo", **PLAIN)
    except Failed as failed:
        pytest.skip(f"DeepSpeed fails over gloo too: {failed.reason}")
    ours = result_of(command, "numa", tmp_path / "numa", **PLAIN)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
