"""Seconds from the command to the first token and to the first full batch, cold and warm, by phase.

    python benchmarks/start.py --ranks 2 --json start.json --markdown start.md
    python benchmarks/start.py --models gpt2:6,gpt2:48 --repeats 3 --systems compiled,transformers

Cold: no captured graph and no compiled code on disk. Warm: the same command again. A model is a name of
numadist.models and perhaps its number of layers. Seconds are counted from the command: those of a phase include
all before it. Beside ours, on as many CPUs as ranks: Hugging Face's generate with its step compiled for a static cache,
and llama.cpp by its llama-bench, whose time is that of the whole process.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PHASES = ["imported", "model", "generator", "first token", "full batch", "other length", "done"]
MODELS = "smollm2,gpt2:6,gpt2:12,gpt2:24,gpt2:48"


SYSTEMS = ["compiled", "eager", "transformers", "llama.cpp"]


def main() -> int:
    options = parse_options()
    if options.begin:
        return transformers_main(options) if options.peer else rank_main(options)
    found = []
    for name in options.models.split(","):
        for system in options.systems.split(","):
            for state, runs in repeated(name, system, options).items():
                phases = [phase for phase in PHASES if phase in runs[0]]
                medians = {phase: round(statistics.median(run[phase] for run in runs), 1) for phase in phases}
                row = {"model": name, "system": system, "start": state, "seconds": medians}
                found.append(row)
                print(as_row(row), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        Path(options.markdown).write_text(as_markdown(found))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--llama-bench", default=shutil.which("llama-bench"), metavar="PROGRAM")
    parser.add_argument("--json")
    parser.add_argument("--markdown", metavar="FILE", help="a table")
    parser.add_argument("--begin", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def repeated(name: str, system: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Runs by how they started; none of a system that is not here, or does not run the model."""
    if system == "llama.cpp" and (name != "smollm2" or not options.llama_bench):
        return {}
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="numadist-start-") as folder:
            for state in ("cold", "warm"):
                runs.setdefault(state, []).append(one_start(name, system, options, folder))
    return runs


def one_start(name: str, system: str, options: argparse.Namespace, folder: str) -> dict[str, float]:
    """Start the job and return when it reached each phase."""
    if system == "llama.cpp":
        return llama_cpp_start(options)
    command = [__file__, "--models", name, "--dtype", options.dtype, "--batch", str(options.batch)]
    command += ["--begin", str(time.time()), *["--compile"] * (system == "compiled")]
    kept = str(Path(folder) / "numadist")
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "NUMADIST_CACHE_DIR": kept}
    if system == "transformers":
        environ["OMP_NUM_THREADS"] = str(options.ranks)
        command += ["--peer"]
    else:
        ranks = ["--quiet", "--nproc-per-socket", str(options.ranks)]
        command = ["-m", "numadist.launch.cli", *ranks, *command]
    run = subprocess.run(
        [sys.executable, *command], env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    (line,) = [line for line in run.stdout.splitlines() if "{" in line]
    return json.loads(line[line.index("{") :])


def llama_cpp_start(options: argparse.Namespace) -> dict[str, float]:
    """The whole process: load the file, read five tokens, write one."""
    from numadist import models

    begin = time.time()
    asked = ["-p", "5", "-n", "1", "-r", "1", "-t", str(options.ranks), "--no-warmup"]
    command = [options.llama_bench, "-m", str(models.smollm2_path()), *asked]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return {"first token": round(time.time() - begin, 2)}


def transformers_main(options: argparse.Namespace) -> int:
    """One process of Hugging Face's generate; the file is widened to float32, then to the dtype."""
    import torch

    from numadist import models

    reached: dict[str, float] = {}

    def reach(phase: str) -> None:
        reached[phase] = round(time.time() - options.begin, 2)

    reach("imported")
    name, _, layers = options.models.partition(":")
    dtype = getattr(torch, options.dtype)
    if name == "smollm2":
        from transformers import AutoModelForCausalLM

        file = models.smollm2_path()
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()
    else:
        model = models.build(name, dtype, **({"n_layer": int(layers)} if layers else {}))
    reach("model")
    model.forward = torch.compile(model.forward)
    rows, length = options.batch, 128
    prompts = torch.randint(1000, (rows, length), generator=torch.Generator().manual_seed(0))
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "cache_implementation": "static"}
    for phase, given, new in (
        ("first token", prompts[:1], 1),
        ("full batch", prompts, 4),
        ("other length", prompts[:3, :77], 4),
    ):
        with torch.no_grad():
            mask = torch.ones_like(given)
            model.generate(given, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **how)
        reach(phase)
    sys.stdout.write(json.dumps(reached) + "\n")
    return 0


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
    seconds = "  ".join(f"{phase} {s:.1f}" for phase, s in row["seconds"].items() if phase != "done")
    return f"{row['model']:10} {row['system']:12} {row['start']:4}  {seconds}"


def as_markdown(found: list[dict]) -> str:
    """A table, one row a start."""
    shown = PHASES[:-1]
    lines = [f"| model | system | start | {' | '.join(shown)} |", "|---" * (3 + len(shown)) + "|"]
    for row in found:
        seconds = [str(row["seconds"].get(phase, "")) for phase in shown]
        lines.append(f"| {row['model']} | {row['system']} | {row['start']} | {' | '.join(seconds)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
