"""Prefill a language model, sharded over pinned ranks, and compare it with the unsharded model.

    numarun --nproc-per-socket 2 examples/prefill.py
    numarun --nproc-per-socket 2 examples/prefill.py --model gpt2 --rounds 10

Every prompt is answered by the sharded model on all ranks and by the unsharded model in one process on all the
cores, in turn; the run fails if their next tokens differ or their logits are 1e-3 apart.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import numadist
from numadist import models

PROMPTS = [
    "The capital of France is",
    "Water is made of hydrogen and",
    "The first three prime numbers are 2, 3 and",
    "A server with two sockets has two memory controllers, so a program that reads the other socket's memory is",
]
MAX_LOGIT_DIFFERENCE = 1e-3


@dataclass
class Measured:
    """What one rank saw: seconds of each timed forward, and the part of it spent in all-reduces."""

    unsharded_s: list[float] = field(default_factory=list)
    sharded_s: list[float] = field(default_factory=list)
    all_reduce_s: float = 0.0
    logit_difference: float = 0.0
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    options = parse_options()
    dist.init_process_group("numa")
    rank = dist.get_rank()
    cpus = gather(sorted(os.sched_getaffinity(0)))
    baseline = None
    if rank == 0:
        baseline = numadist.UnshardedProcess(
            options.model, [c for own in cpus for c in own], compile=options.compile
        )

    sharded, whole_bytes, prompts = load(options)
    if baseline is not None:
        print(
            f"{options.model}: {len(sharded.schema.blocks)} blocks sharded over {len(cpus)} ranks", flush=True
        )
    measured = Measured()
    for prompt, input_ids in prompts:
        answer(prompt, input_ids, sharded, baseline, options, measured)
    if baseline is not None:
        baseline.close()

    placed = gather((sharded.local_bytes, weight_nodes(sharded)))
    if rank == 0:
        report(options, measured, placed, whole_bytes, [len(c) for c in cpus])
    dist.destroy_process_group()
    return 1 if measured.wrong else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", choices=models.CAUSAL_NAMES)
    parser.add_argument("--rounds", type=int, default=5, help="timed forwards of each system per prompt")
    parser.add_argument("--compile", action="store_true", help="torch.compile both systems")
    return parser.parse_args()


def load(options) -> tuple[torch.nn.Module, int, list[tuple[str, torch.Tensor]]]:
    """This rank's part of the model, the bytes of the whole, and the prompts as token ids [1, S]."""
    model = models.build(options.model)
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    tokenizer = models.tokenizer(options.model)
    if tokenizer is not None:
        prompts = [(text, torch.tensor([tokenizer(text)["input_ids"]])) for text in PROMPTS]
    else:
        draw = torch.Generator().manual_seed(0)
        prompts = [
            (f"{n} random tokens", torch.randint(model.config.vocab_size, (1, n), generator=draw))
            for n in (16, 64, 128)
        ]
    inputs = {"input_ids": prompts[0][1], "use_cache": False, "logits_to_keep": 1}
    any_length = {"input_ids": {1: torch.export.Dim.DYNAMIC}, "use_cache": None, "logits_to_keep": None}
    sharded = numadist.shard(model, inputs, dynamic_shapes=any_length, compile=options.compile)
    return sharded, whole_bytes, prompts


def answer(prompt, input_ids, sharded, baseline, options, measured: Measured) -> None:
    """One prompt on both systems in turn: A B A B, after one untimed call of each."""
    for round_ in range(options.rounds + 1):
        expected = baseline.forward(input_ids) if baseline is not None else None
        dist.barrier()
        numadist.comm_stats(reset=True)
        start = time.perf_counter()
        with torch.no_grad():
            logits = sharded(input_ids=input_ids).logits[0, -1]
        seconds = time.perf_counter() - start
        if expected is not None:
            check(prompt, logits, torch.from_numpy(expected.last[0]), measured)
        if round_ > 0:
            measured.sharded_s.append(seconds)
            measured.all_reduce_s += numadist.comm_stats().total_ns / 1e9
            if expected is not None:
                measured.unsharded_s += expected.seconds
    if baseline is not None:
        print(f"{prompt!r} -> {', '.join(top_tokens(logits, options.model))}", flush=True)


def check(prompt: str, logits: torch.Tensor, expected: torch.Tensor, measured: Measured) -> None:
    difference = (logits - expected).abs().max().item()
    measured.logit_difference = max(measured.logit_difference, difference)
    if logits.argmax() != expected.argmax():
        measured.wrong.append(
            f"{prompt!r}: next token {int(logits.argmax())}, unsharded {int(expected.argmax())}"
        )
    if difference > MAX_LOGIT_DIFFERENCE:
        measured.wrong.append(f"{prompt!r}: logits differ by {difference:.2e}")


def top_tokens(logits: torch.Tensor, model: str, count: int = 3) -> list[str]:
    tokenizer = models.tokenizer(model)
    ids = logits.topk(count).indices.tolist()
    return [repr(tokenizer.decode([i])) if tokenizer is not None else str(i) for i in ids]


def weight_nodes(sharded: torch.nn.Module) -> dict[int, int]:
    """NUMA node -> pages of this rank's weights, asked of the kernel."""
    pages: dict[int, int] = {}
    for parameter in sharded.parameters():
        for node, count in numadist.page_nodes(parameter).items():
            pages[node] = pages.get(node, 0) + count
    return pages


def gather(value) -> list:
    """`value` of every rank, in rank order."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def report(options, measured: Measured, placed, whole_bytes: int, threads: list[int]) -> None:
    unsharded, sharded = (statistics.median(s) for s in (measured.unsharded_s, measured.sharded_s))
    local_bytes = [b for b, _ in placed]
    rows = [
        ("model", f"{options.model}, float32, {'compiled' if options.compile else 'eager'}"),
        ("threads", f"unsharded {sum(threads)}; sharded {' + '.join(map(str, threads))}"),
        ("latency unsharded, median [min-max]", spread_ms(measured.unsharded_s)),
        ("latency sharded, median [min-max]", spread_ms(measured.sharded_s)),
        ("ratio unsharded / sharded", f"{unsharded / sharded:.2f}"),
        ("share of time in all-reduce", f"{measured.all_reduce_s / sum(measured.sharded_s):.1%}"),
        (
            "weights per rank",
            f"{', '.join(f'{b / 1e6:.1f} MB' for b in local_bytes)} of {whole_bytes / 1e6:.1f} MB",
        ),
        ("largest share of a rank", f"{max(local_bytes) / whole_bytes:.2f}"),
        (
            "pages of the weights by NUMA node",
            ", ".join(f"r{r} {nodes}" for r, (_, nodes) in enumerate(placed)),
        ),
        ("max logit difference", f"{measured.logit_difference:.1e}"),
        ("next tokens", "equal for every prompt" if not measured.wrong else "; ".join(measured.wrong)),
    ]
    print()
    for name, value in rows:
        print(f"{name:<38}{value}")


def spread_ms(seconds: list[float]) -> str:
    ms = [1e3 * s for s in seconds]
    return f"{statistics.median(ms):.1f} ms [{min(ms):.1f}-{max(ms):.1f}]"


if __name__ == "__main__":
    sys.exit(main())
