"""The MPI ranks of all_reduce.py, started by mpiexec: LIBRARY COUNTER RANKS SOCKET."""

import json
import os
import socket
import sys

from all_reduce_loop import Loop, pin

# Open MPI and MPICH name the rank before MPI_Init in variables of their own.
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def main() -> None:
    library, counter, ranks, path = sys.argv[1:]
    rank = next(int(os.environ[name]) for name in RANK_NAMES if name in os.environ)
    pin(rank, int(ranks))
    loop = Loop(library, counter, rank, int(ranks), None)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    file = connection.makefile("rw")
    print(rank, file=file, flush=True)
    for line in file:
        job = json.loads(line)
        print(json.dumps(loop.run(job["bytes"], job["dtype"], job["calls"])), file=file, flush=True)
    loop.close()


if __name__ == "__main__":
    main()
