"""The processes of one variant, seen from the harness: started, driven over a pipe, ended."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.variants import VARIANTS, CannotRun, Variant
from numadist.errors import NumadistError
from numadist.topology.cpuset import format_list

if TYPE_CHECKING:
    import numpy as np

START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Answer:
    """What forwards of one shape gave: seconds of each, the last position [B, V], all-reduce times."""

    seconds: list[float]
    last: "np.ndarray"
    all_reduce_s: float = 0.0  # of the last forward, rank 0
    wait_s: float = 0.0  # of it: waiting for the other ranks


class Worker:
    """A variant that is running and idle. Close it when done.

    numarun: options for the variants with ranks, e.g. ["--nproc-per-socket", "2"].
    is_timed: not so for a reference that only checks the others' answers.
    llama_python: the interpreter that has llama-cpp-python.
    """

    def __init__(
        self,
        variant: str,
        model: ModelUnderTest,
        cpus: Iterable[int],
        nodes: Iterable[int] = (),
        numarun: Iterable[str] = (),
        is_timed: bool = True,
        llama_python: str = sys.executable,
    ):
        self.variant: Variant = VARIANTS[variant]
        self.is_timed = is_timed
        self._folder = tempfile.TemporaryDirectory(prefix="numadist-")
        address = os.path.join(self._folder.name, "worker")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(1)
            command = [address, variant, model.model, model.dtype, str(model.longest)]
            command += [format_list(cpus), format_list(nodes), llama_python]
            begin = time.monotonic()
            self._process = subprocess.Popen(self._start(command, list(numarun)))
            self._pipe = self._accept(listener)
        try:
            self._receive(START_TIMEOUT_S)
        except NumadistError:
            self.close()
            raise
        self.ready_s = time.monotonic() - begin

    def _start(self, command: list[str], numarun: list[str]) -> list[str]:
        if self.variant.process != "ranks":
            return [sys.executable, "-m", "numadist.compare.worker_main", *command]
        launcher = [sys.executable, "-m", "numadist.launch.cli", "--quiet", *numarun]
        return [*launcher, "-m", "numadist.compare.worker_main", *command]

    def _accept(self, listener: socket.socket) -> Connection:
        """The worker's connection, or an error soon after the worker has ended without one."""
        listener.settimeout(0.2)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                return Connection(listener.accept()[0].detach())
            except TimeoutError:
                continue
        code = self._process.poll()
        self.close()
        raise NumadistError(
            f"variant {self.variant.name} did not start (exit code {code}); see its output above"
        )

    def forward(self, batch: int, seq: int, times: int = 1, input_ids: "np.ndarray | None" = None) -> Answer:
        """Run `times` forwards of one shape. Raises: CannotRun, NumadistError with the worker's own traceback.

        input_ids: tokens [batch, seq] instead of the model's own.
        """
        self._pipe.send((batch, seq, times, input_ids))
        return Answer(*self._receive(None))

    def close(self) -> None:
        """End the worker's processes."""
        if hasattr(self, "_pipe"):
            self._pipe.close()
        else:
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _receive(self, timeout_s: float | None) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise NumadistError(f"variant {self.variant.name} gave no answer within {timeout_s:g} s")
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            raise NumadistError(
                f"variant {self.variant.name} ended with exit code {code}; see its output above"
            ) from None
        if kind == "cannot":
            raise CannotRun(value)
        if kind == "error":
            raise NumadistError(f"variant {self.variant.name} failed:\n{value}")
        return value
