"""Prefill latency: two pinned ranks of one thread against one process with all threads, both compiled and packed.

    numarun --nproc-per-socket 2 benchmarks/prefill.py --models gpt2 smollm2 --batch 1 --seq 128 512 --json out.json

The bar is torch.compile with freezing in one process on all the cores. In each round both systems run once, in turn;
the ratio is taken inside a round. A case counts as faster (slower) only if all its rounds are; else it is a tie.
Answers are compared before a time counts. Times are rank 0's, from a barrier to its last logit.
"""

import argparse
import json
import math
import statistics
import time

import torch
import torch.distributed as dist

import numadist
from numadist import models
from numadist.comm.process_group import stats
from numadist.compare.unsharded import Unsharded
from numadist.config import config
from numadist.topology.cpuset import parse_list

MAX_ERROR = {"float32": 1e-3, "bfloat16": 0.1}  # of the logits' scale; bf16 rounds at every layer


def main() -> None:
    options = parse_options()
    dist.init_process_group("numa")
    cpus: list = [None] * dist.get_world_size()
    dist.all_gather_object(cpus, parse_list(config().cpus))
    rows = []
    for name in options.models:
        baseline = None
        if dist.get_rank() == 0:
            baseline = Unsharded(name, sorted(sum(cpus, ())), dtype=options.dtype, compile=not options.eager)
        for batch in options.batch:
            for seq in options.seq:
                rows.append(measure(name, batch, seq, baseline, options))
        if baseline is not None:
            baseline.close()
    if dist.get_rank() == 0:
        report(rows, options)
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=models.NAMES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--seq", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--dtype", default="bfloat16", choices=list(MAX_ERROR))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="compile neither system")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def measure(name: str, batch: int, seq: int, baseline: Unsharded | None, options) -> dict:
    """One row: milliseconds of both systems in every round, and what the all-reduces took."""
    model = models.build(name, getattr(torch, options.dtype))
    draw = torch.Generator().manual_seed(seq)
    input_ids = torch.randint(model.config.vocab_size, (batch, seq), generator=draw)
    inputs = {"input_ids": input_ids, "use_cache": False, "logits_to_keep": 1}
    sharded = numadist.shard(model, inputs, compile=not options.eager)
    del model
    row: dict = {
        "model": name,
        "batch": batch,
        "seq": seq,
        "dtype": options.dtype,
        "unsharded_ms": [],
        "sharded_ms": [],
    }
    row["all_reduce_ms"], row["wait_ms"] = [], []
    for round_ in range(options.rounds + 2):  # two to compile and to warm up
        expected = baseline(input_ids) if baseline is not None else None
        dist.barrier()
        stats(reset=True)
        begin = time.perf_counter()
        with torch.no_grad():
            logits = sharded(**inputs).logits
        ours_ms = 1e3 * (time.perf_counter() - begin)
        spent = stats()
        if expected is None:
            continue
        theirs = torch.from_numpy(expected.logits)
        row["error"] = ((logits.float() - theirs).abs().max() / theirs.abs().max()).item()
        assert row["error"] < MAX_ERROR[options.dtype], f"{name} {batch}x{seq}: error {row['error']:.2e}"
        if round_ >= 2:
            row["unsharded_ms"].append(1e3 * expected.seconds)
            row["sharded_ms"].append(ours_ms)
            row["all_reduce_ms"].append(spent.total_ns / 1e6)
            row["wait_ms"].append(spent.wait_ns / 1e6)
    if baseline is not None:
        row["ratios"] = [a / b for a, b in zip(row["unsharded_ms"], row["sharded_ms"], strict=True)]
        print(line(row), flush=True)
    return row


def line(row: dict) -> str:
    low, high = min(row["ratios"]), max(row["ratios"])
    verdict = "faster" if low > 1 else "slower" if high < 1 else "tie"
    return (
        f"{row['model']:<14}{row['batch']:>3}x{row['seq']:<6}{row['dtype']:<10}"
        f"one process {statistics.median(row['unsharded_ms']):8.1f} ms   "
        f"ranks {statistics.median(row['sharded_ms']):8.1f} ms   "
        f"ratio {statistics.median(row['ratios']):.2f} [{low:.2f}-{high:.2f}] {verdict:<7} "
        f"all-reduce {statistics.median(row['all_reduce_ms']):.1f} ms, "
        f"of it waiting {statistics.median(row['wait_ms']):.1f}"
    )


def report(rows: list[dict], options) -> None:
    ratios = [statistics.median(row["ratios"]) for row in rows]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"geometric mean of the ratios {mean:.2f}, worst {min(ratios):.2f}, {len(rows)} cases")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
