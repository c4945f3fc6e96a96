"""One persistent thread per place, pinned before it runs anything, with a thread pool of its own behind it."""

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from numadist import binding
from numadist.errors import PlacementError
from numadist.topology.machine import Machine


@dataclass(frozen=True)
class Place:
    """Where one thread group lives. node None: memory follows the process's policy."""

    cpus: tuple[int, ...]
    node: int | None


def places_of(machine: Machine, count: int | None) -> list[Place]:
    """One place per NUMA node with CPUs; `count` cuts a one-node machine into virtual nodes.

    Raises: PlacementError if the machine cannot be cut so.
    """
    domains = machine.domains
    if count is None or count == len(domains):
        return [
            Place(tuple(c.cpus[0] for c in d.cores), next(iter(machine.memory_of(d.nodes)), None))
            for d in domains
        ]
    cores = [core.cpus[0] for core in machine.cores]
    if len(domains) > 1 or not 1 <= count <= len(cores):
        raise PlacementError(
            f"asked for {count} thread groups; this machine has {len(domains)} NUMA nodes and {len(cores)} cores: "
            "leave `nodes` out for one a node, or give at most one a core on a machine with one node"
        )
    node = next(iter(machine.memory_of(domains[0].nodes)), None)
    cuts = [len(cores) * i // count for i in range(count + 1)]
    return [Place(tuple(cores[a:b]), node) for a, b in itertools.pairwise(cuts)]


Job = tuple[Callable[[int], Any], "queue.SimpleQueue[tuple[int, Any, BaseException | None]]"]


class ThreadGroups:
    """The threads. Affinity, memory policy and OpenMP's thread count belong to a thread, so each sets its own.

    They end with this object or with the process, after the function they run: a thread that is in torch when the
    interpreter ends would abort it.
    """

    def __init__(self, places: Sequence[Place]):
        self.places = list(places)
        self._jobs: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in places]
        self._order = (
            threading.Lock()
        )  # callers of several threads: their functions follow alike in every queue
        threads = [
            threading.Thread(target=_serve, args=(i, jobs), name=f"numadist-node-{i}", daemon=True)
            for i, jobs in enumerate(self._jobs)
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, threads)
        try:
            self.run(lambda i: _bind(places[i]))
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """function(i) on every thread at once; the results in order.

        Raises: the first thread's error; RuntimeError after close().
        """
        done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        with self._order:
            if not self._end.alive:
                raise RuntimeError("these thread groups were closed")
            for jobs in self._jobs:
                jobs.put((function, done))
        results: list[Any] = [None] * len(self.places)
        errors: dict[int, BaseException] = {}
        for _ in self.places:
            i, value, error = done.get()
            results[i] = value
            if error is not None:
                errors[i] = error
        if errors:
            raise errors[min(errors)]
        return results

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._end()


def _serve(i: int, jobs: "queue.SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        function, done = job
        try:
            with torch.no_grad():
                done.put((i, function(i), None))
        except BaseException as error:
            done.put((i, None, error))
        del function, done, job  # what they hold may be what holds the thread


def _end(jobs: "list[queue.SimpleQueue[Job | None]]", threads: list[threading.Thread]) -> None:
    for each in jobs:
        each.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # which may have dropped the last reference
            thread.join()


def _bind(place: Place) -> None:
    binding.bind_cpus(place.cpus)
    if place.node is not None:
        binding.bind_memory("bind", [place.node])
    # The OpenMP team of this thread is made at its first parallel region and inherits its affinity.
    torch.set_num_threads(len(place.cpus))
