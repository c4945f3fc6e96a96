"""Quantized files on ranks and on llama.cpp, in turn: prompts and decoding in tokens/s.

    python benchmarks/quantized.py FILE.gguf ... --llama-cpp FOLDER [--rounds 3] [--json quantized.json]

FOLDER holds llama.cpp's program llama-batched-bench, built on this machine. Both use all CPUs that are allowed: ours on
--ranks ranks, started by numarun, with compiled steps; llama.cpp with a thread a CPU. A round of a file is llama.cpp,
then ours, each a start of its own; medians of the rounds, and their range.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import llama_bench

OURS, LLAMA = "numadist", "llama.cpp"
CONTEXTS, BATCHES = (128, 512), (1, 8)


def main() -> None:
    options = parse_options()
    if options.rank:
        return rank_main(options)
    rows = []
    for file in options.files:
        seen: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
        for number in range(options.rounds + 1):  # the first fills caches of compiled code
            for system, measure in ((LLAMA, of_llama_cpp), (OURS, of_ours)):
                if number == 0 and system == LLAMA:
                    continue
                for context, batch, prompt, decode in measure(file, options):
                    if number > 0:
                        seen.setdefault((system, context, batch), []).append((prompt, decode))
        rows += report(file, seen)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE.gguf")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", required="--rank" not in sys.argv)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="decoded after a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of ours")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


Measured = Iterator[tuple[int, int, float, float]]  # context, batch, tokens/s of the prompt, and decoding


def of_llama_cpp(file: str, options: argparse.Namespace) -> Measured:
    command = [options.llama_cpp / "llama-batched-bench", "-m", file, "-t", len(os.sched_getaffinity(0))]
    command += ["-c", max(CONTEXTS) * max(BATCHES) * 2, "-b", 2048, "-ub", 512, "-ntg", options.tokens]
    command += ["-npp", ",".join(map(str, CONTEXTS)), "-npl", ",".join(map(str, BATCHES))]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    yield from llama_bench.cases(done.stdout)


def of_ours(file: str, options: argparse.Namespace) -> Measured:
    command = [sys.executable, "-m", "numadist.launch.cli", "--quiet", "--prefix", "never"]
    command += ["--nproc-per-node", options.ranks, __file__, file, "--rank"]
    command += ["--tokens", options.tokens, "--dtype", options.dtype]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.startswith("measured "):
            _, context, batch, prompt, decode = line.split()
            yield int(context), int(batch), float(prompt), float(decode)


def rank_main(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import numadist

    dist.init_process_group("numa")
    generator = numadist.Generator.from_pretrained(
        options.files[0],
        dtype=getattr(torch, options.dtype),
        max_batch_size=max(BATCHES),
        max_length=max(CONTEXTS) + options.tokens + 1,
        compile=True,
    )
    for context in CONTEXTS:
        for batch in BATCHES:
            prompts = [[1 + (7 * i + 13 * row) % 1000 for i in range(context)] for row in range(batch)]
            for _ in range(3):  # compiled, recorded, measured
                times: list[float] = []
                begin = time.perf_counter()
                generator.generate(
                    prompts,
                    max_new_tokens=options.tokens + 1,
                    eos_token_id=(),
                    on_token=lambda row, token, times=times: times.append(time.perf_counter()),
                )
            if dist.get_rank() == 0:
                prefilled = times[batch - 1]
                prompt = batch * context / (prefilled - begin)
                decode = batch * options.tokens / (times[-1] - prefilled)
                print(f"measured {context} {batch} {prompt} {decode}", flush=True)
    dist.destroy_process_group()


def report(file: str, seen: dict[tuple[str, int, int], list[tuple[float, float]]]) -> list[dict]:
    rows = []
    print(f"{Path(file).name}: tokens/s, median (range)")
    for context in CONTEXTS:
        for batch in BATCHES:
            for place, phase in enumerate(("prompt", "decode")):
                row = {"file": Path(file).name, "phase": phase, "context": context, "batch": batch}
                for system in (OURS, LLAMA):
                    runs = [run[place] for run in seen[system, context, batch]]
                    row[system] = [statistics.median(runs), min(runs), max(runs)]
                row["ratio"] = row[OURS][0] / row[LLAMA][0]
                rows.append(row)
                shown = ", ".join(
                    f"{system} {row[system][0]:.0f} ({row[system][1]:.0f}-{row[system][2]:.0f})"
                    for system in (OURS, LLAMA)
                )
                print(f"  {phase} {context} x {batch}: {shown}: {row['ratio']:.2f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
