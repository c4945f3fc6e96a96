"""Tokens per second of decoding at a context, ranks against what runs in one process, in turn.

    numarun --nproc-per-socket 2 benchmarks/decode.py --model gpt2 smollm2 --batch 1 8
    numarun --nproc-per-socket 2 benchmarks/decode.py --llama-python VENV/bin/python --json decode.json
    numarun --nproc-per-socket 2 benchmarks/decode.py --dtype bfloat16 float32 --max-isa avx2 --llama-bench FILE

Ours: numadist.Generator(compile=True), one rank per group of cores. Against it, each in one process on all the same
cores: Hugging Face's model with StaticCache, torch.compile and freezing; OpenVINO with a stateful model; llama.cpp.
All hold `context` tokens when a round begins and decode `tokens` more, greedily, in a loop as tight as it gets. Rounds
run the systems in turn, each round starting with another one, and ratios are taken inside a round. A peer that is not
installed is named and left out. llama.cpp may live in an interpreter of its own, or be its program llama-batched-bench,
which says no tokens.

--max-isa measures as on an older CPU (older_cpu.py has what that means for whom): OpenVINO computes in f32 then, as it
does on such a CPU, and llama.cpp's row needs --llama-bench, built for such a CPU.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import llama_bench
import torch
import torch.distributed as dist
from older_cpu import LIMITS, limited

import numadist
from numadist import models
from numadist.compare import noise
from numadist.compare.gguf_file import write_gguf
from numadist.compare.statistics import Timing, ratio
from numadist.compare.variants import CannotRun
from numadist.config import config
from numadist.kernels import attention, skinny
from numadist.topology.cpuset import format_list, parse_list

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
OURS = "numadist"
OURS_CODES = "numadist {}"
OURS_ONEDNN = "numadist oneDNN"
SCRIPTS = {
    "torch.compile": "decode_one_process.py",
    "OpenVINO": "decode_openvino.py",
    "llama.cpp": "decode_llama_cpp.py",
}


def main() -> None:
    options = parse_options()
    if options.max_isa:
        limit(options.max_isa)
    dist.init_process_group("numa")
    cpus = [None] * dist.get_world_size()
    dist.all_gather_object(cpus, parse_list(config().cpus) or tuple(range(torch.get_num_threads())))
    rows = []
    for name, dtype in itertools.product(options.model, options.dtypes):
        rows += measure_model(name, argparse.Namespace(**vars(options), dtype=dtype), sorted(sum(cpus, ())))
    if dist.get_rank() == 0:
        print("\n".join(table(rows)))
        if options.json:
            setting = {
                "command": " ".join(["benchmarks/decode.py", *sys.argv[1:]]),
                "cpus": [format_list(c) for c in cpus],
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                **{k: getattr(options, k) for k in ("dtypes", "max_isa", "context", "tokens", "rounds")},
            }
            Path(options.json).write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))
    dist.destroy_process_group()


def limit(isa: str) -> None:
    """Have this process, and its peers, run with the limit."""
    wanted = limited(isa)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["gpt2", "smollm2"], choices=models.NAMES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32, help="decoded in a round")
    parser.add_argument("--rounds", type=int, default=7)
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtype", dest="dtypes", nargs="+", default=dtypes[:1], choices=dtypes)
    parser.add_argument("--max-isa", choices=LIMITS, help="measure all systems as on a CPU that has no more")
    parser.add_argument(
        "--quantization",
        nargs="*",
        default=[],
        choices=["int8", "int4"],
        help="rows of ours with such weights as well",
    )
    parser.add_argument(
        "--onednn", action="store_true", help="a row of ours without its own f32 kernels as well"
    )
    parser.add_argument("--peers", nargs="*", default=list(SCRIPTS), choices=SCRIPTS)
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter that has llama-cpp-python, default this one",
    )
    parser.add_argument(
        "--llama-bench",
        metavar="FILE",
        help="llama.cpp's program llama-batched-bench, to be measured instead",
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def measure_model(name: str, options, cpus: list[int]) -> list[dict]:
    """Rows of one model; empty on the ranks that only work."""
    model = models.build(name, getattr(torch, options.dtype))
    vocabulary = model.config.vocab_size
    generators = {OURS: make_generator(model, options, None)}
    for quantization in options.quantization:
        model = models.build(name, getattr(torch, options.dtype))
        generators[OURS_CODES.format(quantization)] = make_generator(model, options, quantization)
    if options.onednn:
        model = models.build(name, getattr(torch, options.dtype))
        with without_f32_kernels():
            generators[OURS_ONEDNN] = make_generator(model, options, None)
    del model
    rows = []
    for batch in options.batch:
        prompts = contexts(name, vocabulary, batch, options.context)
        for generator in generators.values():
            decode(generator, prompts, options)  # compiles
        peers = start_peers(name, prompts, options, cpus) if dist.get_rank() == 0 else {}
        times, foreign = measure_rounds(generators, prompts, options, peers)
        answers = {
            system: (answer(generator, prompts, options), "codes" if generator.quantization else "")
            for system, generator in generators.items()
        }
        for system, peer in peers.items():
            answers[system] = (peer.tokens, peer.precision)
            peer.close()
        if dist.get_rank() == 0:
            rows += rows_of({"model": name, "dtype": options.dtype, "batch": batch}, times, answers, foreign)
            print("\n".join(map(line, rows[-len(times) :])), flush=True)
    return rows


def make_generator(model: torch.nn.Module, options, quantization: str | None) -> numadist.Generator:
    return numadist.Generator(
        model,
        max_batch_size=max(options.batch),
        max_length=options.context + options.tokens + 2,
        compile=True,
        quantization=quantization,
    )


@contextlib.contextmanager
def without_f32_kernels():
    """Generators made here decode by oneDNN, and float32 by torch's attention, so without recorded steps."""
    with (
        mock.patch.object(skinny, "panel_width", return_value=None),
        mock.patch.object(attention, "takes", lambda head_dim, dtype, mask: dtype != torch.float32),
    ):
        yield


def measure_rounds(
    generators: dict[str, numadist.Generator],
    prompts: torch.Tensor,
    options,
    peers: "dict[str, Peer | LlamaBench]",
) -> tuple[dict[str, list[float]], float]:
    """Seconds of a step by system and round, and the cores that other work kept busy meanwhile."""
    names = [*generators, *peers]
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    pids += [peer.pid for peer in peers.values() if peer.pid is not None]
    before, own_s, begin = noise.usage(), noise.process_cpu_s(pids), time.monotonic()
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in generators:
                dist.barrier()
                times[name].append(decode(generators[name], prompts, options))
            else:
                times[name].append(peers[name].decode())
    own_s, wall_s = noise.process_cpu_s(pids) - own_s, time.monotonic() - begin
    return times, noise.between(before, noise.usage(), own_s, wall_s, os.cpu_count() or 1).foreign_cores


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

    generator.generate(
        prompts.tolist(), max_new_tokens=options.tokens + 1, do_sample=False, eos_token_id=(), on_token=note
    )
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if times else 0.0


def answer(generator: numadist.Generator, prompts: torch.Tensor, options) -> list[list[int]]:
    """The new tokens of every row."""
    rows = generator.generate(
        prompts.tolist(), max_new_tokens=options.tokens, do_sample=False, eos_token_id=()
    )
    return [row[options.context :] for row in rows]


def start_peers(name: str, prompts: torch.Tensor, options, cpus: list[int]) -> "dict[str, Peer | LlamaBench]":
    """Those that are installed and run this model, warm; the others are named on stderr."""
    setting = {"model": name, "dtype": options.dtype, "cpus": cpus, "tokens": options.tokens}
    setting |= {"prompts": prompts.tolist(), "max_isa": options.max_isa}
    peers = {}
    for system in options.peers:
        begin = time.monotonic()
        try:
            peers[system] = start_peer(system, setting, options)
        except PeerMissing as missing:
            print(f"{name}, batch {len(prompts)}: no row of {system}: {missing}", file=sys.stderr)
            continue
        took_s = time.monotonic() - begin
        print(f"{name}, batch {len(prompts)}: {system} ready after {took_s:.0f} s", file=sys.stderr)
    return peers


def start_peer(system: str, setting: dict, options) -> "Peer | LlamaBench":
    """Raises: PeerMissing."""
    if system == "llama.cpp" and options.llama_bench:
        return LlamaBench(options.llama_bench, setting)
    with tempfile.TemporaryDirectory(prefix="numadist-") as folder:
        python = interpreter(system, options)
        if system == "llama.cpp":
            setting["gguf"] = gguf_file(setting["model"], options.dtype, Path(folder))
        return Peer(python, FOLDER / SCRIPTS[system], setting)


class PeerMissing(Exception):
    """Why a system has no row."""


def interpreter(system: str, options) -> str:
    """The Python a peer runs in. Raises: PeerMissing."""
    if system == "OpenVINO" and importlib.util.find_spec("openvino") is None:
        raise PeerMissing("not installed: pip install openvino")
    if system != "llama.cpp":
        return sys.executable
    if options.max_isa:
        raise PeerMissing(
            "it knows no limit; name a llama-batched-bench built for such a CPU by --llama-bench"
        )
    if subprocess.run([options.llama_python, "-c", "import llama_cpp"], capture_output=True).returncode:
        raise PeerMissing(
            f"{options.llama_python} has no llama-cpp-python; name one that has by --llama-python"
        )
    return options.llama_python


def gguf_file(name: str, dtype: str, folder: Path) -> str:
    """A file with the same weights in the same precision. Raises: PeerMissing."""
    path = folder / f"{name}.gguf"
    try:
        write_gguf(models.build(name, getattr(torch, dtype)), path)
    except CannotRun as limit:
        raise PeerMissing(str(limit)) from None
    return str(path)


def on_cpus(cpus: list[int], command: list[str]) -> list[str]:
    """The command with all these CPUs, whatever those of the rank are that starts it."""
    return [sys.executable, str(FOLDER / "decode_peer.py"), format_list(cpus), *command]


def outside_environment() -> dict[str, str]:
    """Without numarun's threads and places, which are those of one rank."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "NUMADIST_"))}


class Peer:
    """A system on the same cores, in a process of its own; rank 0 talks to it by lines (decode_protocol.py)."""

    def __init__(self, python: str, script: Path, setting: dict):
        self.process = subprocess.Popen(
            on_cpus(setting["cpus"], [python, str(script)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=outside_environment(),
        )
        self.pid = self.process.pid
        ready = self._ask(setting)
        self.tokens, self.precision = ready["tokens"], ready["precision"]
        self.decode()

    def decode(self) -> float:
        return self._ask({})["step_s"]

    def _ask(self, question: dict) -> dict:
        answer = ""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise PeerMissing(f"it ended with exit code {self.process.wait()}; its own output has the reason")
        return json.loads(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class LlamaBench:
    """llama.cpp by its program llama-batched-bench, on tokens of its own; started anew for every round."""

    tokens, pid = None, None

    def __init__(self, program: str, setting: dict):
        rows, context, tokens = len(setting["prompts"]), len(setting["prompts"][0]), setting["tokens"]
        self._folder = tempfile.TemporaryDirectory(prefix="numadist-")
        file = gguf_file(setting["model"], setting["dtype"], Path(self._folder.name))
        words = [program, "-m", file, "-t", len(setting["cpus"]), "-c", rows * (context + tokens)]
        words += ["-b", 2048, "-ub", 512, "-npp", context, "-ntg", tokens, "-npl", rows]
        self._command = on_cpus(setting["cpus"], [str(word) for word in words])
        self.precision = "weights of the file, keys and values f16"
        self.decode()

    def decode(self) -> float:
        """Seconds of a step. Raises: PeerMissing."""
        environment = outside_environment()
        done = subprocess.run(self._command, capture_output=True, text=True, env=environment)
        for case in llama_bench.cases(done.stdout):
            return case.rows / case.decode
        raise PeerMissing(f"it ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")

    def close(self) -> None:
        self._folder.cleanup()


def rows_of(
    case: dict,
    times: dict[str, list[float]],
    answers: dict[str, tuple[list[list[int]] | None, str]],
    foreign: float,
) -> list[dict]:
    """One a system. answers: new tokens, None where they are not said, and precision.

    ratio: its time over ours, above 1 where ours is faster; interval of the median.
    """
    rows = []
    for system, seconds in times.items():
        speed = ratio(Timing(seconds), Timing(times[OURS]))
        row = {**case, "system": system, "step_ms": [1e3 * s for s in seconds]}
        row |= {"tokens_per_s": case["batch"] / statistics.median(seconds), "foreign_cores": foreign}
        row |= {"ratio": speed.median, "ratio_interval": [speed.low, speed.high], "verdict": speed.verdict}
        if system != OURS:
            tokens, row["precision"] = answers[system]
            row["same_tokens"] = None if tokens is None else share_of_same(answers[OURS][0], tokens)
        rows.append(row)
    return rows


def share_of_same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [zip(x, y, strict=True) for x, y in zip(ours, theirs, strict=True)]
    return statistics.fmean(a == b for pair in pairs for a, b in pair)


def line(row: dict) -> str:
    ms = row["step_ms"]
    text = f"{row['model']:<14}{row['dtype']:<9}{row['batch']:>5}  {row['system']:<14}{statistics.median(ms):>7.1f} "
    text += f"{f'[{min(ms):.1f}-{max(ms):.1f}]':<14}{row['tokens_per_s']:>7.1f}"
    if row["system"] != OURS:
        low, high = row["ratio_interval"]
        same = "-" if row["same_tokens"] is None else f"{row['same_tokens']:.0%}"
        text += f"   {row['ratio']:.2f} [{low:.2f}-{high:.2f}] ours {row['verdict']:<7}{same:>5}"
        text += f"  {row['precision']}"
    elif row["foreign_cores"] > 0.2:
        text += f"   noisy: {row['foreign_cores']:.1f} cores busy with other work"
    return text


def table(rows: list[dict]) -> list[str]:
    header = (
        f"{'model':<14}{'dtype':<9}{'batch':>5}  {'system':<14}{'ms a step':>9} {'[range]':<12}{'tok/s':>7}"
    )
    return ["", f"{header}   its time / ours [95 %]   same tokens, precision", *map(line, rows)]


if __name__ == "__main__":
    main()
