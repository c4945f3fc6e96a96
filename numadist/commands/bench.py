"""`numadist bench serve`: what scheduling does to latencies when prompts and decoding share the machine."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from numadist import models
from numadist.config import config
from numadist.errors import GenerateError
from numadist.generation.engine import Policy
from numadist.generation.generator import Generator
from numadist.generation.plot import load_pyplot, plot
from numadist.generation.serving import Targets, Workload, calibrate, serve, summary
from numadist.topology.sysfs import read_machine

# Targets unless asked for: multiples of what a request sees that has the machine for itself.
TTFT_FACTOR, TPOT_FACTOR = 8.0, 2.5
# Rates unless asked for: shares of the load that keeps the engine busy.
LOADS = (0.4, 0.7, 1.0)
# A rate below what a run's seconds can show still gets so many requests.
MIN_REQUESTS = 16
# The model unless asked for: GPT-2 with random weights, small enough that a sweep takes a minute on two cores.
SMALL = {"n_layer": 4, "n_embd": 384, "n_head": 6, "vocab_size": 8192}
TABLE = (
    ("rate", "rate", "{:.1f}"),
    ("policy", "policy", "{}"),
    ("done", "completed", "{}"),
    ("out tok/s", "output_throughput", "{:.0f}"),
    ("ttft p50", "p50_ttft_ms", "{:.0f}"),
    ("p99 ms", "p99_ttft_ms", "{:.0f}"),
    ("tpot p50", "p50_tpot_ms", "{:.1f}"),
    ("p99 ms", "p99_tpot_ms", "{:.1f}"),
    ("itl p99 ms", "p99_itl_ms", "{:.0f}"),
    ("e2el p50 ms", "p50_e2el_ms", "{:.0f}"),
    ("goodput req/s", "request_goodput", "{:.2f}"),
    ("attainment", "attainment", "{:.0%}"),
)


def main(argv: Sequence[str]) -> int:
    """`numadist bench`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="numadist bench", description="benchmarks of this machine")
    commands = parser.add_subparsers(dest="what", required=True)
    serve_parser = commands.add_parser("serve", help=__doc__, description=__doc__)
    _add_options(serve_parser)
    options = parser.parse_args(argv)
    if not options.synthetic:
        raise GenerateError("numadist ships no data set of requests: say --synthetic for seeded random ones")
    if options.plot:
        load_pyplot()  # says so now, not after the sweep, if it is missing
    if not config().job_id and not options.one_process:
        _start_ranks(options, argv)
    if config().job_id:
        dist.init_process_group("numa")
    try:
        _bench(options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--synthetic", action="store_true", help="Poisson arrivals, log-normal lengths, random tokens"
    )
    parser.add_argument(
        "--model",
        default="small",
        metavar="M",
        help=f"small (GPT-2 with {SMALL}) or {', '.join(models.NAMES)}",
    )
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--compile", action="store_true", help="takes minutes to start")
    parser.add_argument(
        "--rate", type=float, nargs="+", help=f"requests a second; default {LOADS} of the capacity"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=[p.value for p in Policy], default=[p.value for p in Policy]
    )
    parser.add_argument("--seconds", type=float, default=7.0, help="of arrivals, at each rate and policy (7)")
    parser.add_argument("--num-requests", type=int, help="of each rate and policy, instead of --seconds")
    parser.add_argument("--prompt-median", type=int, default=256)
    parser.add_argument("--output-median", type=int, default=24)
    parser.add_argument("--sigma", type=float, default=0.6, help="of the logarithm of lengths")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="of the policy chunked")
    parser.add_argument("--max-batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument(
        "--ttft-ms", type=float, help=f"target; default {TTFT_FACTOR:g} x that of a prompt alone"
    )
    parser.add_argument(
        "--tpot-ms", type=float, help=f"target; default {TPOT_FACTOR:g} x that of a full batch"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one-process", action="store_true", help="no ranks")
    parser.add_argument(
        "--nproc-per-socket", type=int, metavar="K", help="ranks; default one per node, at least two"
    )
    parser.add_argument("--json", metavar="FILE", help="all rows with all figures")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="goodput, ttft and tpot over the rate, a line a policy"
    )


def _start_ranks(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Become numarun, which runs this command on every rank."""
    ranks: list[str] = []
    if options.nproc_per_socket:
        ranks = ["--nproc-per-socket", str(options.nproc_per_socket)]
    elif len(read_machine().domains) < 2:
        ranks = ["--nproc-per-node", "2"]
    launcher = [sys.executable, "-m", "numadist.launch.cli", "--quiet", *ranks]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "numadist.commands.main", "bench", *argv])


def _bench(options: argparse.Namespace) -> None:
    dtype = getattr(torch, options.dtype)
    if options.model == "small":
        model = models.build("gpt2", dtype, **SMALL)
    else:
        model = models.build(options.model, dtype)
    model_config: Any = model.config
    generator = Generator(
        model,
        max_batch_size=options.max_batch_size,
        max_length=options.max_length,
        compile=options.compile,
    )
    if generator.rank != 0:
        generator.follow()
        return
    failed = True
    try:
        _sweep(options, generator, model_config.vocab_size)
        failed = False
    finally:
        generator.end(failed)


def _sweep(options: argparse.Namespace, generator: Generator, vocabulary: int) -> None:
    """Rank 0: every rate under every policy, in turn."""
    workload = Workload(
        options.num_requests or MIN_REQUESTS,
        1.0,
        options.prompt_median,
        options.output_median,
        options.sigma,
        vocabulary,
        options.max_length,
        options.seed,
    )
    alone = calibrate(generator.engine(), workload)
    targets = Targets(
        options.ttft_ms or 1e3 * TTFT_FACTOR * alone.prefill_s,
        options.tpot_ms or 1e3 * TPOT_FACTOR * alone.full_step_s,
    )
    capacity = alone.capacity(workload, options.max_batch_size)
    title = f"{options.model}, {options.dtype}, {generator.num_ranks} ranks"
    print(
        f"{title}; prompt {1e3 * alone.prefill_s:.0f} ms, step {1e3 * alone.step_s:.1f} ms, "
        f"of {options.max_batch_size} rows {1e3 * alone.full_step_s:.1f} ms; "
        f"about {capacity:.1f} requests/s keep it busy\n"
        f"targets: ttft {targets.ttft_ms:.0f} ms and tpot {targets.tpot_ms:.1f} ms",
        flush=True,
    )
    print(_line([head for head, *_ in TABLE]), flush=True)
    rows = []
    for rate in options.rate or [round(load * capacity, 2) for load in LOADS]:
        for policy in options.policy:
            count = options.num_requests or max(MIN_REQUESTS, round(rate * options.seconds))
            load = replace(workload, rate=rate, num_requests=count)
            row = _measure(generator, policy, load, targets, options.chunk_tokens)
            print(_line([text.format(row[key]) for _, key, text in TABLE]), flush=True)
            rows.append(row)
    for rate in dict.fromkeys(row["rate"] for row in rows):
        best = max((r for r in rows if r["rate"] == rate), key=lambda r: r["request_goodput"])
        print(f"rate {rate:g}: most goodput with {best['policy']}, {best['request_goodput']:.2f} requests/s")
    if options.json:
        setting = {**vars(options), "ranks": generator.num_ranks, "torch": torch.__version__}
        found = {"targets": vars(targets), "unloaded": vars(alone), "capacity": capacity}
        Path(options.json).write_text(json.dumps({"setting": setting, **found, "rows": rows}, indent=1))
    if options.plot:
        plot(options.plot, rows, vars(targets), title)


def _measure(
    generator: Generator, policy: str, workload: Workload, targets: Targets, chunk_tokens: int
) -> dict[str, Any]:
    engine = generator.engine(Policy(policy), chunk_tokens=chunk_tokens)
    requests, seconds = serve(engine, workload)
    if engine.rows_in_use:
        raise GenerateError(
            f"{engine.rows_in_use} rows of the KV tensors are still in use after the last request"
        )
    return {"rate": workload.rate, "policy": policy, **summary(requests, seconds, targets)}


def _line(cells: Sequence[str]) -> str:
    widths = [8, 15, *(max(10, len(title) + 2) for title, *_ in TABLE[2:])]
    padded = (f"{cell:>{width - 2}}  " for cell, width in zip(cells, widths, strict=True))
    return "".join(padded).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
