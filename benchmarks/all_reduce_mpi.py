"""The MPI ranks of all_reduce.py, started by mpiexec: SOCKET. Needs mpi4py and numpy, not torch.

bf16 has no MPI reduction, so one is compiled (g++ -O3 -march=native) and handed to MPI_Op_create; without g++ there
are no bf16 rows.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
from mpi4py import MPI

BF16_SUM = """
#include <cstdint>
#include <cstring>
static float wide(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t narrow(float f) { uint32_t u; memcpy(&u, &f, 4); return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
extern "C" void bf16_sum(const uint16_t* a, uint16_t* b, const int* n, void*) {
  for (int i = 0; i < *n; ++i) b[i] = narrow(wide(a[i]) + wide(b[i]));
}
"""


def make_bf16_sum() -> MPI.Op | None:
    if shutil.which("g++") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "bf16.so")
        command = ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
        subprocess.run(command, input=BF16_SUM, text=True, check=True)
        function = ctypes.CDLL(library).bf16_sum
    with open("/proc/self/maps") as maps:  # the library that mpi4py found
        path = next(word for line in maps for word in line.split()[-1:] if "/libmpi.so" in word)
    mpi = ctypes.CDLL(path)
    wide_handle = MPI._sizeof(MPI.Op) == ctypes.sizeof(ctypes.c_void_p)  # Open MPI: pointers; MPICH: ints
    handle = ctypes.c_void_p() if wide_handle else ctypes.c_uint()
    mpi.MPI_Op_create(function, 1, ctypes.byref(handle))
    make_bf16_sum.keep = function
    return MPI.Op.fromhandle(handle.value)


def main() -> None:
    world = MPI.COMM_WORLD
    cpus = (
        sorted(os.sched_getaffinity(0)) if len(os.sched_getaffinity(0)) > 1 else list(range(os.cpu_count()))
    )
    if world.size <= len(cpus):
        os.sched_setaffinity(0, {cpus[world.rank]})
    bf16_sum = make_bf16_sum()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    file = connection.makefile("rw")
    print(world.rank, file=file, flush=True)
    for line in file:
        job = json.loads(line)
        bf16 = job["dtype"] == "bfloat16"
        if bf16 and bf16_sum is None:
            print("null", file=file, flush=True)
            continue
        x = np.ones(job["bytes"] // (2 if bf16 else 4), np.uint16 if bf16 else np.float32)
        buffer, op = [x, MPI.UINT16_T if bf16 else MPI.FLOAT], bf16_sum if bf16 else MPI.SUM
        seconds = []
        for _ in range(job["calls"]):
            x.fill(1)
            world.Barrier()
            begin = time.perf_counter()
            world.Allreduce(MPI.IN_PLACE, buffer, op)
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), file=file, flush=True)


if __name__ == "__main__":
    main()
