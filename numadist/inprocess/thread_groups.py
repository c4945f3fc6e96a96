"""One persistent thread per place, pinned before it runs anything, with a thread pool of its own behind it."""

import itertools
import queue
import threading
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


class ThreadGroups:
    """The threads. Affinity, memory policy and OpenMP's thread count belong to a thread, so each sets its own."""

    def __init__(self, places: Sequence[Place]):
        self.places = list(places)
        self._jobs: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in places]
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"numadist-node-{i}", daemon=True)
            for i in range(len(places))
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._collect()  # each has bound itself, or says why not
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """function(i) on every thread at once; the results in order. Raises: the first thread's error."""
        for jobs in self._jobs:
            jobs.put(function)
        return self._collect()

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _collect(self) -> list[Any]:
        results: list[Any] = [None] * len(self.places)
        errors: dict[int, BaseException] = {}
        for _ in self.places:
            i, value, error = self._done.get()
            results[i] = value
            if error is not None:
                errors[i] = error
        if errors:
            raise errors[min(errors)]
        return results

    def _serve(self, i: int) -> None:
        try:
            self._bind(self.places[i])
            self._done.put((i, None, None))
        except BaseException as error:
            self._done.put((i, None, error))
        while (function := self._jobs[i].get()) is not None:
            try:
                with torch.no_grad():
                    self._done.put((i, function(i), None))
            except BaseException as error:
                self._done.put((i, None, error))

    def _bind(self, place: Place) -> None:
        binding.bind_cpus(place.cpus)
        if place.node is not None:
            binding.bind_memory("bind", [place.node])
        # The OpenMP team of this thread is made at its first parallel region and inherits its affinity.
        torch.set_num_threads(len(place.cpus))
