"""The baseline a user has today: the unsharded model in one process on all the cores of the job.

The process is started from a rank, which is pinned to its own node; so it first widens its CPUs and drops the
inherited memory policy, and only then imports torch.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from numadist import _syscalls, binding
from numadist.errors import NumadistError
from numadist.topology.cpuset import format_list, parse_list

if TYPE_CHECKING:
    from torch import Tensor

START_TIMEOUT_S = 600
MAX_SHAPES = 64


@dataclass(frozen=True)
class Reply:
    """What one forward of the baseline gave."""

    logits: Any  # numpy array: tensors would travel as open file descriptors
    seconds: float


class Unsharded:
    """A running baseline process; call it as a model, close it when done. It idles between calls."""

    def __init__(self, model: str, cpus: Iterable[int], *, dtype: str = "float32", compile: bool = False):
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "numadist.compare.unsharded", str(theirs.fileno())]
            command += [format_list(cpus), model, dtype, str(int(compile))]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._pipe = ours
        if not self._pipe.poll(START_TIMEOUT_S) or self._receive() != "ready":
            self._process.kill()
            raise NumadistError(f"the unsharded baseline of {model} did not start within {START_TIMEOUT_S} s")

    def __call__(self, input_ids: "Tensor") -> Reply:
        """Prefill once: logits of the last position, [B, 1, V], and the seconds the forward took."""
        self._pipe.send(input_ids.numpy())
        return Reply(*self._receive())

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            code = self._process.wait()
            raise NumadistError(
                f"the unsharded baseline ended with exit code {code}; see its output above"
            ) from None


def _serve(pipe: Connection, model_name: str, dtype: str, num_threads: int, compile: bool) -> None:
    import torch

    from numadist import models

    torch.set_num_threads(num_threads)
    model = models.build(model_name, getattr(torch, dtype))
    # The bar is the best of torch: Inductor with weights packed once. Every shape is compiled for itself.
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    run: Any = torch.compile(model, dynamic=False, options={"freezing": True}) if compile else model
    pipe.send("ready")
    while True:
        try:
            input_ids = torch.from_numpy(pipe.recv())
        except EOFError:
            return
        with torch.no_grad():
            start = time.perf_counter()
            logits = run(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits
            seconds = time.perf_counter() - start
        pipe.send((logits.float().numpy(), seconds))


def main() -> None:
    _syscalls.set_parent_death_signal(signal.SIGKILL)
    fd, cpu_list, model_name, dtype, compile = sys.argv[1:]
    cpus = parse_list(cpu_list)
    binding.bind_cpus(cpus)
    binding.bind_memory("local", ())
    _serve(Connection(int(fd)), model_name, dtype, len(cpus), bool(int(compile)))


if __name__ == "__main__":
    main()
