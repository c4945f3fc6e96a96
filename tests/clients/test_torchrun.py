"""torchrun restarts a job whose rank died: its second life works, and nothing of the first is left."""

import pytest
from clients import PROGRAMS, TORCHRUN, result_of

pytestmark = [pytest.mark.mp, pytest.mark.slow]


@pytest.mark.parametrize("backend", ["gloo", "numa"])
def test_a_restarted_job_sums_again(tmp_path, backend):
    command = (*TORCHRUN, "2", "--max-restarts", "1", str(PROGRAMS / "restarted.py"), str(tmp_path))
    said = result_of(command, backend, tmp_path / "run")
    assert said == {"life": 1, "sum": 3.0}
    if backend == "numa":
        assert "rank 1" in (tmp_path / "seen").read_text()
