"""Latency of all_reduce through torch.distributed: ours against Gloo, in the same processes.

    python benchmarks/all_reduce.py --ranks 2 --json out.json

Both systems are called by dist.all_reduce on groups of the same ranks, one thread a rank. For each size and
dtype blocks of calls alternate (ours, gloo, ours, gloo, ...), so that a change of the machine hits both alike.
Before each block all ranks meet in a barrier; between calls the tensor is written, as a model would. Times are
rank 0's.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
DTYPES = [torch.float32, torch.bfloat16]
SYSTEMS = ["numadist", "gloo"]
BACKENDS = {"numadist": "numa", "gloo": "gloo"}
NUM_BLOCKS = 8
BLOCK_S = 0.06  # aim of one block of calls


def time_block(group: dist.ProcessGroup, x: torch.Tensor, num_calls: int) -> list[float]:
    """Seconds of each of num_calls all_reduces; x is written between them."""
    seconds = []
    dist.barrier(group)
    for _ in range(num_calls):
        x.fill_(1.0)
        begin = time.perf_counter()
        dist.all_reduce(x, group=group)
        seconds.append(time.perf_counter() - begin)
    return seconds


def calls_per_block(group: dist.ProcessGroup, x: torch.Tensor) -> int:
    """As many as fit BLOCK_S; rank 0 decides for all."""
    time_block(group, x, 3)
    median = statistics.median(time_block(group, x, 5))
    count = torch.tensor([max(3, min(2000, int(BLOCK_S / median)))])
    dist.broadcast(count, src=0, group=group)
    return int(count.item())


def measure(groups: dict[str, dist.ProcessGroup], num_bytes: int, dtype: torch.dtype) -> list[dict]:
    """One row a system; `blocks_us` are the medians of its blocks, which show the spread."""
    x = torch.ones(num_bytes // dtype.itemsize, dtype=dtype)
    counts = {name: calls_per_block(group, x) for name, group in groups.items()}
    blocks: dict[str, list[list[float]]] = {name: [] for name in groups}
    for _ in range(NUM_BLOCKS):
        for name, group in groups.items():
            blocks[name].append(time_block(group, x, counts[name]))
    rows = []
    for name in groups:
        times = sorted(t for block in blocks[name] for t in block)
        rows.append(
            {
                "system": name,
                "bytes": num_bytes,
                "dtype": str(dtype).removeprefix("torch."),
                "ranks": dist.get_world_size(),
                "median_us": round(statistics.median(times) * 1e6, 2),
                "p99_us": round(times[int(0.99 * (len(times) - 1))] * 1e6, 2),
                "calls": len(times),
                "blocks_us": [round(statistics.median(block) * 1e6, 2) for block in blocks[name]],
            }
        )
    return rows


def run_rank(rank: int, args: argparse.Namespace, store_path: str) -> None:
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    if args.ranks <= len(cpus):
        os.sched_setaffinity(0, {cpus[rank]})
    store = dist.FileStore(store_path, args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    groups = {name: dist.new_group(backend=BACKENDS[name]) for name in SYSTEMS}
    rows = []
    for dtype in DTYPES:
        for num_bytes in args.sizes:
            found = measure(groups, num_bytes, dtype)
            rows += found
            if rank == 0:
                print(line_of(found), flush=True)
    if rank == 0 and args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    dist.destroy_process_group()


def line_of(rows: list[dict]) -> str:
    """One line of the table: the ratio is gloo's median over ours, its spread that of neighbouring blocks."""
    ours, gloo = rows
    ratios = [g / o for o, g in zip(ours["blocks_us"], gloo["blocks_us"], strict=True)]
    cells = [f"{ours['dtype']:>9} {ours['bytes'] >> 10:>6} KiB"]
    cells += [f"{row['median_us']:>10.1f} {row['p99_us']:>10.1f}" for row in rows]
    cells.append(f"{gloo['median_us'] / ours['median_us']:>7.1f}x ({min(ratios):.1f} - {max(ratios):.1f})")
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    args = parser.parse_args()
    print(f"all_reduce, {args.ranks} ranks, torch {torch.__version__}, us per call (median, p99)")
    print(
        f"{'dtype':>9} {'size':>10}  {'numadist':>10} {'p99':>10}  {'gloo':>10} {'p99':>10}  ratio (blocks)"
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
