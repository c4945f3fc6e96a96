"""How long to spin for a peer when other programs want the same cores: benchmarks/results/busy_cores.md.

Two ranks, each pinned to a core with none, one or two busy neighbours, work for a while and sum, as decoding does. The
settings of NUMADIST_SPIN_US follow each other in turn.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SPINS_US = (0, 10, 50, 200, 1000)
NEIGHBOURS = (0, 1, 2)
CALLS = 400
WORK_US = 200
BYTES = 16384


def run_rank(rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("numa", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    x = torch.zeros(BYTES // 4)
    for _ in range(50):
        dist.all_reduce(x)
    begin = time.perf_counter()
    for _ in range(CALLS):
        end = time.thread_time_ns() + WORK_US * 1000  # of this thread's own time, whoever else runs
        while time.thread_time_ns() < end:
            pass
        dist.all_reduce(x)
    if rank == 0:
        print("RESULT", 1e6 * (time.perf_counter() - begin) / CALLS, flush=True)
    dist.destroy_process_group()


@contextlib.contextmanager
def busy(neighbours: int) -> Iterator[None]:
    """So many programs that never sleep on each of two cores."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen([*command, str(cpu)]) for cpu in cpus for _ in range(neighbours)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(spin_us: int) -> float:
    """Microseconds a round of work and sum."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "NUMADIST_SPIN_US": str(spin_us), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--store", f"{folder}/store", "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        said = ranks[0].communicate()[0]
        ranks[1].communicate()
    return float(said.partition("RESULT ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "busy_cores.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.store)
        return
    lines = [
        "# Spinning on busy cores",
        "",
        f"Made by `python benchmarks/busy_cores.py --turns {options.turns}`, load "
        f"{' '.join(f'{x:.2f}' for x in os.getloadavg())} at the beginning. Microseconds of {WORK_US} us of work and "
        f"one all_reduce of {BYTES} bytes, two ranks on two cores: median (least, most) of the turns, in which the "
        f"settings of NUMADIST_SPIN_US follow each other.",
        "",
        f"| busy neighbours a core | {' | '.join(f'spin {us} us' for us in SPINS_US)} |",
        f"|---|{'---|' * len(SPINS_US)}",
    ]
    for neighbours in NEIGHBOURS:
        found: dict[int, list[float]] = {us: [] for us in SPINS_US}
        with busy(neighbours):
            for _ in range(options.turns):
                for us in SPINS_US:
                    found[us].append(measure(us))
        cells = [f"{statistics.median(us):.0f} ({min(us):.0f}, {max(us):.0f})" for us in found.values()]
        lines.append(f"| {neighbours} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
