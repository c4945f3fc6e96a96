"""When a guest is ended. Processes of this machine, or nothing but their progress, stand in for its emulation."""

import subprocess

import progress
import psutil
import pytest


def test_a_guest_that_does_nothing_is_ended_with_all_it_started(tmp_path):
    run = subprocess.Popen(["sh", "-c", "sleep 100071 & wait"])
    assert not progress.ends(run, tmp_path, stall_s=0.5, stall_cpu_s=0.4)
    assert run.returncode == -9
    assert ["sleep", "100071"] not in [
        process.info["cmdline"] for process in psutil.process_iter(["cmdline"])
    ]


def test_the_end_of_a_guest_is_not_waited_for_longer_than_it_takes(tmp_path):
    assert progress.ends(subprocess.Popen(["true"]), tmp_path, stall_s=1e5)


class Guest:
    """Ends at its n-th look."""

    def __init__(self, num_looks: int):
        self.num_looks = num_looks

    def wait(self, limit_s: float) -> None:
        self.num_looks -= 1
        if self.num_looks > 0:
            raise subprocess.TimeoutExpired("guest", limit_s)


@pytest.mark.parametrize(
    "seen",
    [
        [(0, 0.0), (0, 30.0), (0, 60.0), (0, 90.0)],
        [(0, 0.0), (9, 1.0), (18, 2.0), (19, 2.0)],
        [(0, 0.0), (0, 30.0), (7, 30.0), (7, 55.0)],
    ],
    ids=["computes", "writes", "does either"],
)
def test_a_guest_that_gets_on_runs_to_its_end(tmp_path, monkeypatch, seen):
    looks = iter(seen)
    monkeypatch.setattr(progress, "progress", lambda run, share: next(looks))
    assert progress.ends(Guest(len(seen)), tmp_path)
    assert list(looks) == [], "it was looked at each time"
