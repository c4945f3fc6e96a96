"""How long until a rank that waits in a collective learns that its peer was killed?

    python benchmarks/dead_rank.py --runs 20 --json out.json

Two processes on backend numa; one is killed by SIGKILL while the other waits for it. Time from the signal to the
CommError, by the clock that both processes share.
"""

import argparse
import json
import multiprocessing as mp
import os
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

BEFORE_KILL_S = 0.2  # the other rank is asleep in its wait by then


def rank_main(rank: int, path: str, pipe: Connection) -> None:
    """Rank 1 tells when it kills itself, rank 0 when it is told."""
    import torch
    import torch.distributed as dist

    from numadist.errors import CommError

    dist.init_process_group("numa", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        time.sleep(BEFORE_KILL_S)
        pipe.send(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1024))
    except CommError:
        pipe.send(time.monotonic())


def measure(runs: int) -> list[float]:
    """Seconds of each run."""
    context = mp.get_context("spawn")
    seconds = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            pipes = [context.Pipe(duplex=False) for _ in range(2)]
            ranks = [
                context.Process(target=rank_main, args=(rank, f"{folder}/store", write))
                for rank, (_, write) in enumerate(pipes)
            ]
            for process in ranks:
                process.start()
            told_s, killed_s = (read.recv() for read, _ in pipes)
            for process in ranks:
                process.join()
            seconds.append(told_s - killed_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the seconds here")
    options = parser.parse_args()
    seconds = measure(options.runs)
    print(
        f"told after {statistics.median(seconds):.3f} s ({min(seconds):.3f}-{max(seconds):.3f}, {len(seconds)} runs)"
    )
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=2) + "\n")


if __name__ == "__main__":
    main()
