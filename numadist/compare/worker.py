"""The processes of one variant, and the pipe the harness drives them by.

`python -m numadist.compare.worker SOCKET VARIANT MODEL DTYPE LONGEST CPUS NODES PYTHON`, under numarun where there
are ranks. PYTHON: the interpreter that has llama-cpp-python.
A single process first widens or narrows its CPUs and sets its memory policy, and only then imports torch: what it
inherits from the harness, or from a pinned rank that asks for a baseline, must not count.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from numadist import _syscalls, binding
from numadist.compare.variants import VARIANTS, CannotRun, Variant
from numadist.errors import NumadistError
from numadist.topology.cpuset import format_list, parse_list

if TYPE_CHECKING:
    import numpy as np
    import torch

START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Job:
    """What all variants run: a model of numadist.models (or module:function) with room for `longest` positions."""

    model: str
    dtype: str
    longest: int = 0

    def load(
        self, batch: int, seq: int, kept: "torch.nn.Module | None" = None
    ) -> "tuple[torch.nn.Module, dict[str, Any]]":
        """The unsharded model and its keyword inputs for one shape. kept: loaded before, to use again if it fits."""
        import torch

        from numadist import models

        if kept is not None and ":" not in self.model and models.has_room(kept, seq):
            return kept, models.prefill_inputs(kept, batch, seq)
        return models.workload(self.model, batch, seq, getattr(torch, self.dtype), self.longest)


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
        job: Job,
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
            command = [address, variant, job.model, job.dtype, str(job.longest)]
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

    def forward(self, batch: int, seq: int, times: int = 1, input_ids: "np.ndarray | None" = None) -> Answer:
        """Run `times` forwards of one shape. Raises: CannotRun, NumadistError with the worker's own traceback.

        input_ids: tokens [batch, seq] instead of the job's own.
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


def main() -> None:
    """Entry point of the worker's processes."""
    address, name, model, dtype, longest, cpu_list, node_list, llama_python = sys.argv[1:]
    variant, job = VARIANTS[name], Job(model, dtype, int(longest))
    if variant.process == "ranks":
        from numadist.compare.ranks import serve_rank

        serve_rank(address, variant, job)
        return
    _syscalls.set_parent_death_signal(signal.SIGKILL)
    cpus = parse_list(cpu_list)
    binding.bind_cpus(cpus)
    # `default` is Linux's own: local to whoever touches first, undoing what a pinned parent bound.
    policy = "local" if variant.policy == "default" else variant.policy
    binding.bind_memory(policy, parse_list(node_list))
    with connect(address) as pipe:
        if variant.process == "inprocess":
            shapes = OneShape(job, in_process)
        else:
            shapes = OneShape(job, single_process(variant, len(cpus), llama_python))
        serve(pipe, lambda batch, seq, times, input_ids: timed(*shapes(batch, seq, input_ids), times))


def connect(address: str) -> Connection:
    """The harness's end, from a worker."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        return Connection(sock.detach())


def serve(pipe: Connection, model: Any) -> None:
    """Answer requests until the harness hangs up. model takes what Worker.forward does, returns an Answer's fields."""
    pipe.send(("ok", "ready"))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", model(*request)))
        except CannotRun as limit:
            pipe.send(("cannot", str(limit)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


class OneShape:
    """A variant's model for one shape at a time: what the last shape had compiled and packed is freed first.

    make(model, inputs): what to call with the inputs instead of the model.
    keeps_model: the unsharded model is loaded once; otherwise anew for every shape, and freed when `make` is done.
    """

    def __init__(self, job: Job, make: Callable[[Any, dict[str, Any]], Any], keeps_model: bool = True):
        self.job, self.make, self.keeps_model = job, make, keeps_model
        self.shape: tuple[int, int] | None = None
        self.kept: Any = None
        self.run: Any = None
        self.inputs: dict[str, Any] = {}

    def __call__(
        self, batch: int, seq: int, input_ids: "np.ndarray | None" = None
    ) -> tuple[Any, dict[str, Any]]:
        """What runs this shape, and its inputs."""
        import torch

        if self.shape != (batch, seq):
            self._drop()
            model, self.inputs = self.job.load(batch, seq, self.kept)
            if self.keeps_model:
                self.kept = model
            self.run = self.make(model, self.inputs)
            self.shape = (batch, seq)
        given = {} if input_ids is None else {"input_ids": torch.from_numpy(input_ids)}
        return self.run, {**self.inputs, **given}

    def _drop(self) -> None:
        import torch

        if hasattr(self.run, "close"):  # threads or a process of its own
            self.run.close()
        self.shape = self.run = None
        torch.compiler.reset()  # compiled graphs hold packed weights
        gc.collect()


def single_process(
    variant: Variant, num_threads: int, llama_python: str
) -> Callable[[Any, dict[str, Any]], Any]:
    """The unsharded model in one process, as OneShape makes it."""
    import torch

    torch.set_num_threads(num_threads)
    if variant.compile == "none":
        return lambda model, inputs: model
    if variant.packages:
        from numadist.compare import peers

        if variant.compile == "llama.cpp":
            return lambda model, inputs: peers.LlamaCpp(model, inputs, num_threads, llama_python)
        convert = peers.openvino if variant.compile == "openvino" else peers.onnxruntime
        return lambda model, inputs: convert(model, inputs, num_threads)
    # As an option of torch.compile it would do nothing: see numadist/shard/compiled.py.
    torch._inductor.config.freezing = variant.compile == "freezing"
    return lambda model, inputs: torch.compile(model, dynamic=False)


def in_process(model: Any, inputs: dict[str, Any]) -> Any:
    """The model split over thread groups of one process, as OneShape makes it."""
    from numadist import inprocess
    from numadist.topology.sysfs import read_machine

    groups = None if len(read_machine().domains) > 1 else 2
    return inprocess.shard(model, inputs, nodes=groups, compile=True)


def timed(
    run: Any, inputs: Mapping[str, Any], times: int, before: Callable[[], None] = lambda: None
) -> tuple[list[float], "np.ndarray"]:
    """Seconds of each forward, and the last position's answer [B, V]. before: runs untimed before each."""
    import torch

    from numadist import models

    seconds = []
    with torch.no_grad():
        for _ in range(times):
            before()
            begin = time.perf_counter()
            outputs = run(**inputs)
            seconds.append(time.perf_counter() - begin)
    return seconds, models.last_position(outputs).float().numpy()


if __name__ == "__main__":
    main()
