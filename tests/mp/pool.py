"""A pool of ranks for tests: started once per module, each runs functions it is sent.

No launcher: plain spawned processes with torch's file store.
"""

import contextlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

# Only a hang reaches these limits, however loaded the machine: of one answer, and of one collective.
ANSWER_S = 300.0
COLLECTIVE_S = 120.0


@dataclass(frozen=True)
class Settings:
    """What all ranks of a pool share. prepare(rank) runs in each once torch is there, before it joins."""

    backend: str
    timeout_s: float
    machines: str
    prepare: Callable[[int], None] | None
    folder: str


def _serve(rank: int, world: int, settings: Settings, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if settings.prepare is not None:
        settings.prepare(rank)
    dist.init_process_group(
        settings.backend,
        store=dist.FileStore(os.path.join(settings.folder, "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    pipe.send((True, os.getpid()))
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(rank, world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """`world` ranks in processes of their own, in one process group."""

    def __init__(self, world: int, settings: Settings):
        context = mp.get_context("spawn")
        self.world = world
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, settings, theirs), daemon=True)
            # In the environment from the start: unpickling the arguments may import numadist.
            with mock.patch.dict(os.environ, NUMADIST_MACHINE=settings.machines[rank : rank + 1]):
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.pids = self.answers(range(world))

    def send(self, rank: int, function: Callable, *args: Any) -> None:
        self.pipes[rank].send((function, args))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """(whether its function returned, what it returned or why it did not)"""
        if not self.pipes[rank].poll(ANSWER_S):
            return False, f"no answer in {ANSWER_S:g} s"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return False, "it died"

    def answers(self, ranks: range | list[int]) -> list[Any]:
        """What the ranks' functions returned; an exception fails the test with the rank's own traceback.

        All are waited for first: an answer left in its pipe would be taken for that of the next call.
        """
        seen = {rank: self._answer(rank) for rank in ranks}
        failed = [f"rank {rank} of {self.world}:\n{value}" for rank, (ok, value) in seen.items() if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in seen.values()]

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """function(rank, world, *args) on every rank; returns the results in rank order."""
        for rank in range(self.world):
            self.send(rank, function, *args)
        return self.answers(range(self.world))

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()


def shm_files() -> set[str]:
    """The files in /dev/shm, but not the locks that multiprocessing, also of tests beside this one, makes there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@contextlib.contextmanager
def ranks(
    world: int,
    backend: str = "numa",
    timeout_s: float = COLLECTIVE_S,
    machines: str = "",
    prepare: Callable[[int], None] | None = None,
) -> Iterator[Pool]:
    """machines: a letter a rank; ranks with different letters behave as on different machines."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # prepare may change the user
        pool = Pool(world, Settings(backend, timeout_s, machines, prepare, folder))
        try:
            yield pool
        finally:
            pool.close()
