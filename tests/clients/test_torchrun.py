"""torchrun restarts a job whose rank died: its second life works, and nothing of the first is left.

Gloo is no measure here: the restarted ranks share the first life's store, and now and then it connects to a dead one.
"""

import pytest
from clients import PROGRAMS, TORCHRUN, result_of

pytestmark = [pytest.mark.mp, pytest.mark.slow]


def test_a_restarted_job_sums_again(tmp_path):
    command = (*TORCHRUN, "2", "--max-restarts", "1", str(PROGRAMS / "restarted.py"), str(tmp_path))
    assert result_of(command, "numa", tmp_path / "run") == {"life": 1, "sum": 3.0}
    assert "rank 1" in (tmp_path / "seen").read_text()
