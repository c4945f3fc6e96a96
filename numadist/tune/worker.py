"""One rank of a trial of `numadist tune`: a few layers of the model's shape, run as generation runs them.

python -m numadist.tune.worker MODEL DTYPE LAYERS SECONDS OUT, started by numarun --plan. Rank 0 writes
{"prefill_ms": t, "decode": {threads: {"b1_ms": t, "b8_ms": t}}} to OUT.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from numadist import models
from numadist.config import config
from numadist.generation.generator import Generator
from numadist.graph.passes import run_passes
from numadist.phases.phase import use_plan
from numadist.phases.plan import PlanPair, load_plan
from numadist.pipeline import passes
from numadist.topology.sysfs import read_machine
from numadist.topology.tree import build_tree
from numadist.tune.search import pair_of, score, thread_steps, walk

PREFILL_TOKENS, BATCHES, ROUNDS = 512, (1, 8), 5
VOCABULARY = 1024  # the head is no layer


def main(name: str, dtype: str, layers: str, seconds: str, out: str) -> None:
    end = time.monotonic() + float(seconds)
    trial = load_plan(config().plan)
    if len(trial.prefill.ranks) > 1:
        dist.init_process_group("numa")
    model = models.build(
        name,
        getattr(torch, dtype),
        num_hidden_layers=int(layers),
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * PREFILL_TOKENS,
    )
    generator = Generator(model, max_batch_size=max(BATCHES), max_length=PREFILL_TOKENS + 64)
    run_passes(generator.runner.part.gm, passes.PACKED)
    rank = generator.rank
    ranks = tuple(part.cpus for part in trial.prefill.ranks)
    costs: dict[int, dict[str, float]] = {}

    def cost_of(threads: int) -> float | None:
        """Of decoding with so many threads, agreed on by all ranks; None once time is up."""
        use_plan(pair_of(ranks, threads), rank)
        times = _agreed(generator, _decode_times(generator) if not costs or time.monotonic() < end else None)
        if times is None:
            return None
        costs[threads] = dict(zip((f"b{b}_ms" for b in BATCHES), times, strict=True))
        return score(costs[threads])

    use_plan(trial, rank)
    prefill = _agreed(generator, [_prefill_time(generator)])
    walk(thread_steps(max(len(cpus) for cpus in ranks), _num_domains(trial)), cost_of)
    if rank == 0:
        Path(out).write_text(json.dumps({"prefill_ms": prefill[0] if prefill else None, "decode": costs}))
    if dist.is_initialized():
        dist.destroy_process_group()


def _num_domains(trial: PlanPair) -> int:
    """Last-level caches under the largest rank."""
    tree = build_tree(read_machine())
    llc = next((d for d, kind in enumerate(tree.kinds) if "Llc" in kind), 0)
    _, cpus = max((len(part.cpus), part.cpus) for part in trial.prefill.ranks)
    return max(1, sum(bool(set(cpus) & set(node.cpus)) for node in tree.level(llc)))


def _agreed(generator: Generator, times: list[float] | None) -> list[float] | None:
    """Rank 0's times on every rank."""
    shared = torch.zeros(len(BATCHES)) if times is None else torch.tensor([*times, 0.0])[: len(BATCHES)]
    generator.peers.broadcast(shared)
    found = [t for t in shared.tolist() if t > 0]
    return found or None


def _prefill_time(generator: Generator) -> float:
    return _fastest(generator, [list(range(PREFILL_TOKENS))], [0], 3)


def _decode_times(generator: Generator) -> list[float]:
    """ms of one step at every batch size; the smallest of interleaved rounds."""
    best = dict.fromkeys(BATCHES, float("inf"))
    for _ in range(ROUNDS):
        for batch in BATCHES:
            tokens, starts = [[1]] * batch, [PREFILL_TOKENS] * batch
            best[batch] = min(best[batch], _fastest(generator, tokens, starts, 2))
    return list(best.values())


def _fastest(generator: Generator, tokens: list[list[int]], starts: list[int], repeats: int) -> float:
    """ms of the fastest of some steps. Every rank calls it; only rank 0's value counts."""
    if generator.rank != 0:
        generator.follow()
        return 1.0
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        generator.runner.run(0, tokens, starts, 1)
        took.append(time.perf_counter() - begin)
    generator.end()
    return min(took) * 1e3


if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    main(*arguments)
