"""The processes of one variant, and the pipe the harness drives them by.

`python -m numadist.compare.worker SOCKET VARIANT MODEL DTYPE CPUS NODES`, under numarun for the variants with ranks.
A single process first widens or narrows its CPUs and sets its memory policy, and only then imports torch: what it
inherits from the harness, or from a pinned rank that asks for a baseline, must not count.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from numadist import _syscalls, binding
from numadist.compare.variants import VARIANTS, Variant
from numadist.errors import NumadistError
from numadist.topology.cpuset import format_list, parse_list

if TYPE_CHECKING:
    import numpy as np

START_TIMEOUT_S = 600.0
MAX_SHAPES = 64  # compiled for one worker before torch would fall back to eager


@dataclass(frozen=True)
class Answer:
    """What forwards of one input gave: seconds of each, logits of the last position [B, V], all-reduce times."""

    seconds: list[float]
    logits: "np.ndarray"
    all_reduce_s: float = 0.0  # of the last forward, rank 0
    wait_s: float = 0.0  # of it: waiting for the other ranks


class Worker:
    """A variant that is running and idle. Close it when done.

    numarun: options for the variants with ranks, e.g. ["--nproc-per-socket", "2"].
    """

    def __init__(
        self,
        variant: str,
        model: str,
        dtype: str,
        cpus: Iterable[int],
        nodes: Iterable[int] = (),
        numarun: Iterable[str] = (),
    ):
        self.variant: Variant = VARIANTS[variant]
        self._folder = tempfile.TemporaryDirectory(prefix="numadist-")
        address = os.path.join(self._folder.name, "worker")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(1)
            command = [address, variant, model, dtype, format_list(cpus), format_list(nodes)]
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
            return [sys.executable, "-m", "numadist.compare.worker", *command]
        launcher = [sys.executable, "-m", "numadist.launch.cli", "--quiet", *numarun]
        return [*launcher, "-m", "numadist.compare.worker", *command]

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

    def forward(self, input_ids: "np.ndarray", times: int = 1) -> Answer:
        """Run `times` forwards of input_ids [B, S]. Raises: NumadistError with the worker's own traceback."""
        self._pipe.send((input_ids, times))
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
        if kind == "error":
            raise NumadistError(f"variant {self.variant.name} failed:\n{value}")
        return value


def main() -> None:
    """Entry point of the worker's processes."""
    address, name, model, dtype, cpu_list, node_list = sys.argv[1:]
    variant = VARIANTS[name]
    if variant.process == "ranks":
        from numadist.compare.ranks import serve_rank

        serve_rank(address, variant, model, dtype)
        return
    _syscalls.set_parent_death_signal(signal.SIGKILL)
    cpus = parse_list(cpu_list)
    binding.bind_cpus(cpus)
    # `default` is Linux's own: local to whoever touches first, undoing what a pinned parent bound.
    policy = "local" if variant.policy == "default" else variant.policy
    binding.bind_memory(policy, parse_list(node_list))
    with connect(address) as pipe:
        if variant.process == "inprocess":
            serve(pipe, InProcess(model, dtype))
        else:
            serve(pipe, SingleProcess(variant, model, dtype, len(cpus)))


def connect(address: str) -> Connection:
    """The harness's end, from a worker."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        return Connection(sock.detach())


def serve(pipe: Connection, model: Any) -> None:
    """Answer requests until the harness hangs up. model(input_ids, times) returns the fields of an Answer."""
    pipe.send(("ok", "ready"))
    while True:
        try:
            input_ids, times = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", model(input_ids, times)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


class SingleProcess:
    """The unsharded model in one process."""

    def __init__(self, variant: Variant, model: str, dtype: str, num_threads: int):
        import torch

        from numadist import models

        torch.set_num_threads(num_threads)
        torch._dynamo.config.recompile_limit = MAX_SHAPES
        built = models.build(model, getattr(torch, dtype))
        modes: dict[str, dict[str, Any]] = {"plain": {}, "freezing": {"freezing": True}}
        options = modes.get(variant.compile)
        self.run: Any = built if options is None else torch.compile(built, dynamic=False, options=options)

    def __call__(self, input_ids: "np.ndarray", times: int) -> tuple[list[float], "np.ndarray"]:
        return timed(self.run, input_ids, times)


class InProcess:
    """The model split over thread groups of one process, anew for every shape."""

    def __init__(self, model: str, dtype: str):
        import torch

        self.model, self.dtype = model, getattr(torch, dtype)
        self.split: dict[tuple[int, ...], Any] = {}

    def __call__(self, input_ids: "np.ndarray", times: int) -> tuple[list[float], "np.ndarray"]:
        if input_ids.shape not in self.split:
            self.split[input_ids.shape] = self.shard(input_ids)
        return timed(self.split[input_ids.shape], input_ids, times)

    def shard(self, input_ids: "np.ndarray") -> Any:
        import torch

        from numadist import inprocess, models
        from numadist.topology.sysfs import read_machine

        inputs = {"input_ids": torch.from_numpy(input_ids), "use_cache": False, "logits_to_keep": 1}
        groups = None if len(read_machine().domains) > 1 else 2
        return inprocess.shard(models.build(self.model, self.dtype), inputs, nodes=groups, compile=True)


def timed(
    run: Any, input_ids: "np.ndarray", times: int, before: Callable[[], None] = lambda: None
) -> tuple[list[float], "np.ndarray"]:
    """Seconds of each forward, and the logits of the last position [B, V]. before: runs untimed before each."""
    import torch

    ids = torch.from_numpy(input_ids)
    seconds = []
    with torch.no_grad():
        for _ in range(times):
            before()
            begin = time.perf_counter()
            logits = run(input_ids=ids, use_cache=False, logits_to_keep=1).logits
            seconds.append(time.perf_counter() - begin)
    return seconds, logits[:, -1].float().numpy()


if __name__ == "__main__":
    main()
