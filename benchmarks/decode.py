"""Tokens per second of decoding at a context, ranks against one process, in turn.

    numarun --nproc-per-socket 2 benchmarks/decode.py --model gpt2 smollm2 --batch 1 8
    numarun --nproc-per-socket 2 benchmarks/decode.py --json decode.json

Ours: numadist.Generator(compile=True), one rank per group of cores. Against it, on all the same cores in one process:
Hugging Face's model with StaticCache, torch.compile and freezing, its own step in a loop as tight as it gets. Both
hold `context` tokens when a round begins and decode `tokens` more; rounds alternate, and ratios are taken inside a
round. A row of OpenVINO or llama.cpp needs those packages and is not measured here.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import numadist
from numadist import models
from numadist.compare import noise
from numadist.config import config
from numadist.topology.cpuset import format_list, parse_list

BASELINE = Path(__file__).with_name("decode_one_process.py")
README = Path(__file__).parents[1] / "README.md"


def main() -> None:
    options = parse_options()
    dist.init_process_group("numa")
    cpus = [None] * dist.get_world_size()
    dist.all_gather_object(cpus, parse_list(config().cpus) or tuple(range(torch.get_num_threads())))
    rows = []
    for name in options.model:
        rows += measure_model(name, options, sorted(sum(cpus, ())))
    if dist.get_rank() == 0:
        print("\n".join(table(rows)))
        if options.json:
            setting = {
                "command": " ".join(["benchmarks/decode.py", *sys.argv[1:]]),
                "cpus": [format_list(c) for c in cpus],
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                **{k: getattr(options, k) for k in ("dtype", "context", "tokens", "rounds")},
            }
            Path(options.json).write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["gpt2", "smollm2"], choices=models.NAMES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32, help="decoded in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def measure_model(name: str, options, cpus: list[int]) -> list[dict]:
    """Rows of one model; empty on the ranks that only work."""
    model = models.build(name, getattr(torch, options.dtype))
    vocabulary = model.config.vocab_size
    longest = options.context + options.tokens + 2
    generator = numadist.Generator(model, max_batch_size=max(options.batch), max_length=longest, compile=True)
    del model
    rows = []
    for batch in options.batch:
        prompts = contexts(name, vocabulary, batch, options.context)
        decode(generator, prompts, options)  # compiles
        baseline = OneProcess(name, prompts, options, cpus) if dist.get_rank() == 0 else None
        if baseline is not None:
            print(
                f"{name}, batch {batch}: both are compiled, {options.rounds} rounds follow", file=sys.stderr
            )
        ours, theirs = [], []
        pids = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        pids += [baseline.process.pid] if baseline is not None else []
        before, own_s, begin = noise.usage(), noise.process_cpu_s(pids), time.monotonic()
        for _ in range(options.rounds):
            dist.barrier()
            ours.append(decode(generator, prompts, options))
            if baseline is not None:
                theirs.append(baseline.decode())
        own_s, wall_s = noise.process_cpu_s(pids) - own_s, time.monotonic() - begin
        foreign = noise.between(before, noise.usage(), own_s, wall_s, os.cpu_count() or 1).foreign_cores
        if baseline is not None:
            baseline.close()
            rows.append(row(name, batch, ours, theirs, baseline.tokens, generator, prompts, options))
            rows[-1]["foreign_cores"] = foreign
            print(line(rows[-1]), flush=True)
        else:
            generator.generate(prompts.tolist(), max_new_tokens=options.tokens, eos_token_id=())
    return rows


def contexts(name: str, vocabulary: int, batch: int, length: int) -> torch.Tensor:
    """[B, length] token ids: the README from different places, or random ones for models without a tokenizer."""
    tokenizer = models.tokenizer(name)
    if tokenizer is None:
        return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(batch))
    text = torch.tensor(tokenizer(README.read_text())["input_ids"])
    return torch.stack([text.roll(-64 * row)[:length] for row in range(batch)])


def decode(generator: numadist.Generator, prompts: torch.Tensor, options) -> float:
    """Seconds of one step of all rows: median of a round. Prompts are read anew, untimed."""
    last_row, times = len(prompts) - 1, []

    def note(row: int, token: int) -> None:
        if row == last_row:
            times.append(time.perf_counter())

    generator.generate(prompts.tolist(), max_new_tokens=options.tokens + 1, eos_token_id=(), on_token=note)
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if times else 0.0


class OneProcess:
    """The baseline on the same cores, in a process of its own; rank 0 talks to it by lines."""

    def __init__(self, name: str, prompts: torch.Tensor, options, cpus: list[int]):
        setting = {"model": name, "dtype": options.dtype, "cpus": cpus, "tokens": options.tokens}
        # numarun's threads and places are those of one rank.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "NUMADIST_"))}
        self.process = subprocess.Popen(
            [sys.executable, str(BASELINE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.tokens = self._ask({**setting, "prompts": prompts.tolist()})["tokens"]
        self.decode()

    def decode(self) -> float:
        return self._ask({})["step_s"]

    def _ask(self, question: dict) -> dict:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def row(name, batch, ours, theirs, their_tokens, generator, prompts, options) -> dict:
    answer = generator.generate(prompts.tolist(), max_new_tokens=options.tokens, eos_token_id=())
    our_tokens = [a[options.context :] for a in answer]
    same = sum(
        a == b for x, y in zip(our_tokens, their_tokens, strict=True) for a, b in zip(x, y, strict=True)
    )
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "model": name,
        "batch": batch,
        "ours_ms": [1e3 * s for s in ours],
        "one_process_ms": [1e3 * s for s in theirs],
        "ours_tokens_per_s": batch / statistics.median(ours),
        "one_process_tokens_per_s": batch / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "same_tokens": same / (batch * options.tokens),
    }


def line(row: dict) -> str:
    def spread(ms: list[float]) -> str:
        return f"{statistics.median(ms):6.1f} [{min(ms):.1f}-{max(ms):.1f}]"

    return (
        f"{row['model']:<12}{row['batch']:>5}  {spread(row['ours_ms']):<22}{row['ours_tokens_per_s']:>7.1f}  "
        f"{spread(row['one_process_ms']):<22}{row['one_process_tokens_per_s']:>7.1f}  "
        f"{row['ratio']:.2f} [{row['ratio_min']:.2f}-{row['ratio_max']:.2f}]  {row['same_tokens']:.0%}"
        + (
            f"  noisy: {row['foreign_cores']:.1f} cores busy with other work"
            if row["foreign_cores"] > 0.2
            else ""
        )
    )


def table(rows: list[dict]) -> list[str]:
    header = (
        f"{'model':<12}{'batch':>5}  {'ours ms/step':<22}{'tok/s':>7}  {'one process ms/step':<22}{'tok/s':>7}  "
        "ratio  same tokens"
    )
    return ["", header, *map(line, rows)]


if __name__ == "__main__":
    main()
