"""PyTorch's own backend tests (they ship in the wheel) on backend numa.

The suite skips much for a backend it does not know, so it is told that it tests gloo, and the calls that name gloo
make our groups: every test that gloo runs here, we run. The number of ranks is CONFORMANCE_RANKS (2, 3 or 4).
CONFORMANCE_BACKEND=gloo runs the suite on gloo itself, to compare; CONFORMANCE_MACHINES=2 on ranks that behave as on
two machines in turn.
"""

import functools
import os
import tempfile
from dataclasses import replace

import pytest

RANKS = os.environ.get("CONFORMANCE_RANKS", "2")
MACHINES = int(os.environ.get("CONFORMANCE_MACHINES", "1"))
TESTED = os.environ.get("CONFORMANCE_BACKEND", "numa")
# The suite reads these when it is imported.
os.environ.update(BACKEND="gloo", WORLD_SIZE=RANKS, TEMP_DIR=tempfile.mkdtemp(), OMP_NUM_THREADS="1")

pytest.importorskip("expecttest", reason="torch's test utilities need the package expecttest")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import distributed_test as suite

from numadist import config

pytestmark = [pytest.mark.mp, pytest.mark.conformance, pytest.mark.slow]

# Test -> why it cannot pass. Everything gloo passes and that is not named here must pass.
DIFFERENT = {
    "test_get_backend": "compares the group's backend with the name of the tested one, which is gloo here"
}


def stand_in_for_gloo():
    """In a rank's process: calls that name gloo make groups of backend numa."""

    def renamed(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            args = tuple(TESTED if arg == "gloo" else arg for arg in args)
            kwargs = {key: TESTED if value == "gloo" else value for key, value in kwargs.items()}
            return function(*args, **kwargs)

        return call

    get_backend = distributed_c10d.get_backend

    @functools.wraps(get_backend)
    def as_gloo(group=None):
        name = get_backend(group)
        return "gloo" if name == TESTED else name

    dist.init_process_group = renamed(dist.init_process_group)
    dist.new_group = renamed(dist.new_group)
    # Only torch's own look at the name, which keeps monitored_barrier to gloo; the tests see the true one.
    distributed_c10d.get_backend = as_gloo


class TestNuma(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    def setUp(self):
        if TESTED != "gloo" and (reason := DIFFERENT.get(self._testMethodName)):
            self.skipTest(reason)
        super().setUp()
        # Forked: the suite and torch are imported once, not once a rank and test.
        self._start_processes(mp.get_context("fork").Process)

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        torch.set_num_threads(1)
        if MACHINES > 1:
            config._config = replace(config.config(), machine=str(rank % MACHINES))
        if TESTED != "gloo":
            stand_in_for_gloo()
        super()._run(rank, test_name, file_name, pipe, **kwargs)
