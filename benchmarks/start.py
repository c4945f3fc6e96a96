"""Seconds from the command to the first token and to the first full batch, cold and warm, by phase.

    python benchmarks/start.py --ranks 2 --json start.json
    python benchmarks/start.py --models gpt2:6,gpt2:48 --repeats 3

Cold: no captured graph and no compiled code on disk. Warm: the same command again. A model is a name of
numadist.models and perhaps its number of layers. Seconds are counted from the command: those of a phase include
all before it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PHASES = ["imported", "model", "generator", "first token", "full batch", "other length", "done"]
MODELS = "smollm2,gpt2:6,gpt2:12,gpt2:24,gpt2:48"


def main() -> int:
    options = parse_options()
    if options.begin:
        return rank_main(options)
    found = []
    for name in options.models.split(","):
        for compile in (True, False):
            measured = repeated(name, compile, options)
            for state, runs in measured.items():
                medians = {phase: round(statistics.median(run[phase] for run in runs), 1) for phase in PHASES}
                row = {"model": name, "compile": compile, "start": state, "seconds": medians}
                found.append(row)
                print(as_row(row), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--begin", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def repeated(name: str, compile: bool, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Runs by how they started; without compilation there is nothing to keep."""
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="numadist-start-") as folder:
            for state in ("cold", "warm") if compile else ("cold",):
                runs.setdefault(state, []).append(one_start(name, compile, options, folder))
    return runs


def one_start(name: str, compile: bool, options: argparse.Namespace, folder: str) -> dict[str, float]:
    """Start the job and return when it reached each phase."""
    command = [sys.executable, "-m", "numadist.launch.cli", "--nproc-per-socket", str(options.ranks)]
    command += [__file__, "--models", name, "--dtype", options.dtype, "--batch", str(options.batch)]
    command += ["--begin", str(time.time()), *["--compile"] * compile]
    kept = str(Path(folder) / "numadist")
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "NUMADIST_CACHE_DIR": kept}
    run = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in run.stdout.splitlines() if "{" in line]
    return json.loads(line[line.index("{") :])


def rank_main(options: argparse.Namespace) -> int:
    """One rank of the job."""
    import torch
    import torch.distributed as dist

    import numadist
    from numadist import models

    reached: dict[str, float] = {}

    def reach(phase: str) -> None:
        reached.setdefault(phase, round(time.time() - options.begin, 2))

    dist.init_process_group("numa")
    reach("imported")
    name, _, layers = options.models.partition(":")
    dtype, weights = getattr(torch, options.dtype), None
    if name == "smollm2":
        model, weights = models.smollm2_without_memory(dtype), models.smollm2_path()
    else:
        model = models.build(name, dtype, **({"n_layer": int(layers)} if layers else {}))
    reach("model")
    rows, length = options.batch, 128
    made = {"max_batch_size": rows, "max_length": 512, "weights": weights, "compile": options.compile}
    generator = numadist.Generator(model, **made)
    reach("generator")
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, (rows, length), generator=draw).tolist()
    answer = {"max_new_tokens": 4, "eos_token_id": ()}
    generator.generate(prompts[:1], on_token=lambda row, token: reach("first token"), **answer)
    generator.generate(prompts, **answer)
    reach("full batch")
    generator.generate([prompt[:77] for prompt in prompts[:3]], **answer)
    reach("other length")
    dist.barrier()
    reach("done")
    if dist.get_rank() == 0:
        print(json.dumps(reached), flush=True)
    dist.destroy_process_group()
    return 0


def as_row(row: dict) -> str:
    how = "compiled" if row["compile"] else "eager"
    seconds = "  ".join(f"{phase} {row['seconds'][phase]:.1f}" for phase in PHASES[:-1])
    return f"{row['model']:10} {how:8} {row['start']:4}  {seconds}"


if __name__ == "__main__":
    sys.exit(main())
