"""The torch ranks of all_reduce.py: LIBRARY COUNTER RANKS STORE SOCKET."""

import json
import socket
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from all_reduce_loop import LIMITS, Loop, pin

from numadist import _native

NUM_COMPILED = 16  # all_reduces in one compiled graph


class Systems:
    """How to all_reduce one tensor, by name."""

    def __init__(self, library: str, counter: str, ranks: int) -> None:
        self.groups = {"numadist": dist.new_group(backend="numa"), "gloo": dist.new_group(backend="gloo")}
        self.ours = self.groups["numadist"]
        self.loop = Loop(library, counter, dist.get_rank(), ranks, self.ours._core())
        self.compiled: dict[tuple, tuple[Callable, Callable]] = {}

    def call(self, system: str, x: torch.Tensor) -> Callable[[], object]:
        group = self.groups[system]
        return lambda: dist.all_reduce(x, group=group)

    def graphs(self, x: torch.Tensor) -> tuple[Callable, Callable]:
        """A compiled graph with NUM_COMPILED all_reduces, and the same one without."""
        key = (x.shape, x.dtype)
        if key not in self.compiled:
            name = self.ours.group_name

            def with_sums(t: torch.Tensor) -> torch.Tensor:
                for _ in range(NUM_COMPILED):
                    t = t * 0.5
                    torch.ops.numadist.all_reduce_(t, name)
                return t

            def without(t: torch.Tensor) -> torch.Tensor:
                for _ in range(NUM_COMPILED):
                    t = t * 0.5
                    torch.ops.numadist_bench.keep_(t)
                return t

            self.compiled[key] = (torch.compile(with_sums), torch.compile(without))
        return self.compiled[key]


# Stands where the all_reduce would, so that the graph without it has the same kernels and buffers.
_library = torch.library.Library("numadist_bench", "DEF")
_library.define("keep_(Tensor(a!) x) -> ()")


@torch.library.impl(_library, "keep_", "CPU")
def _keep(x: torch.Tensor) -> None:
    pass


@torch.library.register_fake("numadist_bench::keep_", lib=_library)
def _keep_fake(x: torch.Tensor) -> None:
    pass


def time_calls(systems: Systems, system: str, num_bytes: int, dtype: str, calls: int) -> list[float]:
    """Seconds of each all_reduce; its tensor is written between them."""
    if system in LIMITS:
        return systems.loop.run(num_bytes, dtype, calls, system)
    if system == "numadist-core":
        return systems.loop.run(num_bytes, dtype, calls)
    x = torch.ones(num_bytes // getattr(torch, dtype).itemsize, dtype=getattr(torch, dtype))
    if system == "numadist-compiled":
        return time_compiled(systems, x, max(1, calls // NUM_COMPILED))
    call, barrier, handle = systems.call(system, x), _native.lib.nd_barrier, systems.ours._core()
    seconds = []
    for _ in range(calls):
        x.fill_(1.0)
        barrier(handle)
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def time_compiled(systems: Systems, x: torch.Tensor, calls: int) -> list[float]:
    """Per all_reduce: a graph of many of them, less the fastest run of the graph without."""
    barrier, handle = _native.lib.nd_barrier, systems.ours._core()
    times: list[list[float]] = []
    with torch.no_grad():
        for graph in systems.graphs(x):
            graph(x)
            times.append([])
            for _ in range(max(calls, 3)):
                barrier(handle)
                begin = time.perf_counter()
                graph(x)
                times[-1].append(time.perf_counter() - begin)
    base = sorted(times[1])[len(times[1]) // 2]
    return [max(t - base, 0.0) / NUM_COMPILED for t in times[0]]


def run_rank(rank: int, library: str, counter: str, ranks: int, store_path: str, socket_path: str) -> None:
    torch.set_num_threads(1)
    pin(rank, ranks)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, ranks), rank=rank, world_size=ranks)
    systems = Systems(library, counter, ranks)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path)
    file = connection.makefile("rw")
    print(rank, file=file, flush=True)
    for line in file:
        job = json.loads(line)
        seconds = time_calls(systems, job["system"], job["bytes"], job["dtype"], job["calls"])
        print(json.dumps(seconds), file=file, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    library, counter, ranks, store_path, socket_path = sys.argv[1:]
    mp.spawn(run_rank, (library, counter, int(ranks), store_path, socket_path), nprocs=int(ranks))
