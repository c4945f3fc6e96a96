"""The torch ranks of all_reduce.py: RANKS STORE SOCKET."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from numadist import _native
from numadist.comm.dtypes import CODES

NUM_COMPILED = 16  # all_reduces in one compiled graph


class Systems:
    """How to all_reduce one tensor, by name."""

    def __init__(self) -> None:
        self.groups = {"numadist": dist.new_group(backend="numa"), "gloo": dist.new_group(backend="gloo")}
        self.ours = self.groups["numadist"]
        self.compiled: dict[tuple, tuple[Callable, Callable]] = {}

    def call(self, system: str, x: torch.Tensor) -> Callable[[], object]:
        if system in self.groups:
            group = self.groups[system]
            return lambda: dist.all_reduce(x, group=group)
        if system == "memcpy":
            y = torch.ones_like(x)
            return lambda: x.copy_(y)
        handle, function = self.ours._core(), _native.lib.nd_all_reduce
        address, count, dtype = x.data_ptr(), x.numel(), CODES[x.dtype]
        return lambda: function(handle, address, address, count, dtype, _native.Op.SUM)

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


def time_calls(systems: Systems, system: str, x: torch.Tensor, calls: int) -> list[float]:
    """Seconds of each all_reduce; x is written between them."""
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


def run_rank(rank: int, ranks: int, store_path: str, socket_path: str) -> None:
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    if ranks <= len(cpus):
        os.sched_setaffinity(0, {cpus[rank]})
    dist.init_process_group("gloo", store=dist.FileStore(store_path, ranks), rank=rank, world_size=ranks)
    systems = Systems()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path)
    file = connection.makefile("rw")
    print(rank, file=file, flush=True)
    for line in file:
        job = json.loads(line)
        dtype = getattr(torch, job["dtype"])
        x = torch.ones(job["bytes"] // dtype.itemsize, dtype=dtype)
        print(json.dumps(time_calls(systems, job["system"], x, job["calls"])), file=file, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run_rank, (int(sys.argv[1]), sys.argv[2], sys.argv[3]), nprocs=int(sys.argv[1]))
