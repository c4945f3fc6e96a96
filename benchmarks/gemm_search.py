"""A demonstrator: search of matrix-product programs for shapes that arrive one by one, against oneDNN.

    python benchmarks/gemm_search.py --threads 2 --dtype float32 bfloat16
    python benchmarks/gemm_search.py --shapes 40 --json gemm_search.json

The search is that of Sandwich (arXiv 2507.18454). A program is a micro-kernel, three slice sizes and a grid of threads;
benchmarks/gemm_text.py writes the kernels.

fast start: of each micro-kernel, slices grow one dimension after another, K, M, N: doubled while that makes the slice's
rate at least 2 % better; the first doubling that does not is rolled back and locks the dimension.
thread aggregation: the grids of the threads are tried, threads that stand together sharing rows.
sliding window: the first 16 shapes try every micro-kernel; later ones only those that won one of the last 16 shapes. A
candidate is dropped as soon as one timing is twice the best so far.

Weights are packed beforehand, for either side. oneDNN's layer rounds its bf16 results, ours leaves them f32.
numadist does not search at run time: benchmarks/results/gemm_search.md says why.
"""

import argparse
import collections
import ctypes
import functools
import json
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import gemm_text
import torch

GROWS = 1.02  # a doubling must make a slice this much faster
HOPELESS = 2.0  # times the best: a candidate is dropped
WINDOW = 16
FIRST_K = 64
MIN_TIMED_S = 1e-4
ROUNDS = 3
LAYERS = ((768, 2304), (768, 3072), (3072, 768))  # inputs, outputs: GPT-2's


@dataclass(frozen=True)
class Program:
    """rows x 16 * vectors: the micro-kernel. mc, nc, kc: its slices. tm x tn: threads over rows and columns."""

    rows: int
    vectors: int
    mc: int
    nc: int
    kc: int
    tm: int = 1
    tn: int = 1

    @property
    def kernel(self) -> tuple[int, int]:
        return self.rows, self.vectors


class _Program(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("rows", "vectors", "mc", "nc", "kc", "tm", "tn")]


class _Call(ctypes.Structure):
    _fields_ = [
        ("program", _Program),
        *[(name, ctypes.c_void_p) for name in ("a", "b", "c")],
        *[(name, ctypes.c_long) for name in ("m", "n", "k")],
        ("thread_index", ctypes.c_void_p),
    ]


class Engine:
    """The compiled kernels of one dtype, on torch's own OpenMP threads."""

    def __init__(self, dtype: str, folder: Path):
        text, library = folder / f"{dtype}.cpp", folder / f"{dtype}.so"
        text.write_text(gemm_text.source(dtype))
        begin = time.monotonic()
        subprocess.run(
            ["g++", "-O3", "-std=c++17", "-funroll-loops", "-shared", "-fPIC", "-w", text, "-o", library],
            check=True,
        )
        self.compile_s = time.monotonic() - begin
        self._run = ctypes.CDLL(str(library)).run
        self._run.argtypes = [ctypes.POINTER(_Call), ctypes.c_void_p]
        program = ctypes.CDLL(None)
        self._parallel = ctypes.cast(program.GOMP_parallel, ctypes.c_void_p)
        self._thread_index = ctypes.cast(program.omp_get_thread_num, ctypes.c_void_p)
        self.num_timings = 0

    def call(self, program: Program, a_MK: torch.Tensor, panels: torch.Tensor, c_MN: torch.Tensor) -> None:
        fields = _Program(*(getattr(program, name) for name, _ in _Program._fields_))
        pointers = a_MK.data_ptr(), panels.data_ptr(), c_MN.data_ptr()
        call = _Call(fields, *pointers, *c_MN.shape, a_MK.shape[1], self._thread_index)
        self._run(ctypes.byref(call), self._parallel)

    def seconds(self, program: Program, problem: "Problem") -> float:
        self.num_timings += 1
        tensors = problem.a_MK, problem.panels(program.vectors), problem.c_MN
        return timed(lambda: self.call(program, *tensors))


class Problem:
    """y = x W^T: x [M, K], W [N, K] as panels of any width, and oneDNN's packed layer of the same."""

    def __init__(self, w_NK: torch.Tensor, num_rows: int):
        self.w_NK = w_NK
        self.a_MK = torch.randn(num_rows, w_NK.shape[1]).to(w_NK.dtype)
        self.c_MN = torch.empty(num_rows, w_NK.shape[0])
        self._panels: dict[int, torch.Tensor] = {}

    def panels(self, vectors: int) -> torch.Tensor:
        """[N / width, K, width], or pairs of K side by side in bf16."""
        if vectors not in self._panels:
            width, (num_out, num_in) = gemm_text.LANES * vectors, self.w_NK.shape
            pair = 2 if self.w_NK.dtype == torch.bfloat16 else 1
            split = self.w_NK.view(num_out // width, width, num_in // pair, pair)
            self._panels[vectors] = split.transpose(1, 2).contiguous()
        return self._panels[vectors]

    def one_dnn(self) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(self.a_MK, self._blob, None, "none", [], "")

    @functools.cached_property
    def _blob(self) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(self.w_NK, 128)


def timed(work) -> float:
    """Seconds of one call: the best of a few batches of calls."""
    work()
    begin = time.perf_counter()
    work()
    calls = max(1, round(MIN_TIMED_S / max(time.perf_counter() - begin, 1e-7)))
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


class Search:
    """Programs for the shapes of one layer, one after another."""

    def __init__(self, engine: Engine, w_NK: torch.Tensor, num_threads: int):
        self.engine, self.w_NK, self.num_threads = engine, w_NK, num_threads
        self.kernels = gemm_text.candidates(w_NK.shape[0])
        self.winners: collections.deque[tuple[int, int]] = collections.deque(maxlen=WINDOW)
        self._slices: dict[tuple[tuple[int, int], int], Program] = {}

    def program_for(self, num_rows: int) -> tuple[Program, Problem]:
        problem = Problem(self.w_NK, num_rows)
        full = len(self.winners) == WINDOW
        kernels = sorted(set(self.winners)) if full else [k for k in self.kernels if k[0] < 2 * num_rows]
        best: tuple[float, Program] | None = None
        for kernel in kernels:
            start = self.fast_start(kernel, num_rows)
            for grid in grids(self.num_threads):
                program = replace(start, tm=grid[0], tn=grid[1])
                seconds = self.engine.seconds(program, problem)
                if best is None or seconds < best[0]:
                    best = seconds, program
                elif seconds > HOPELESS * best[0]:
                    break
        assert best is not None
        self.winners.append(best[1].kernel)
        return best[1], problem

    def fast_start(self, kernel: tuple[int, int], num_rows: int) -> Program:
        """Slice sizes by one thread on a slice alone; kept for numbers of rows of the same power of two."""
        bucket = 1 << (num_rows - 1).bit_length()
        if (kernel, bucket) in self._slices:
            return self._slices[kernel, bucket]
        num_out, num_in = self.w_NK.shape
        width = gemm_text.LANES * kernel[1]
        limits = {"kc": num_in, "mc": max(bucket, kernel[0]), "nc": num_out}
        program = Program(*kernel, mc=kernel[0], nc=width, kc=min(FIRST_K, num_in))
        rate = self._slice_rate(program)
        for size, limit in limits.items():
            while (doubled := min(2 * getattr(program, size), limit)) > getattr(program, size):
                if size == "nc":
                    doubled -= doubled % width
                tried = replace(program, **{size: doubled})
                new_rate = self._slice_rate(tried)
                if new_rate < GROWS * rate:
                    break
                program, rate = tried, new_rate
        self._slices[kernel, bucket] = program
        return program

    def _slice_rate(self, program: Program) -> float:
        part = Problem(self.w_NK[: program.nc, : program.kc].contiguous(), program.mc)
        return program.mc * program.nc * program.kc / self.engine.seconds(program, part)


def grids(num_threads: int) -> list[tuple[int, int]]:
    return [(tm, num_threads // tm) for tm in range(1, num_threads + 1) if num_threads % tm == 0]


def measure(engine: Engine, dtype: str, layer: tuple[int, int], options) -> dict:
    """One layer: a stream of numbers of rows, each searched when it comes, then timed in turn with oneDNN."""
    torch.manual_seed(0)
    w_NK = torch.randn(layer[1], layer[0]).to(getattr(torch, dtype))
    search = Search(engine, w_NK, options.threads)
    draw = random.Random(1)
    shapes = []
    for _ in range(options.shapes):
        # As many short batches as long ones.
        num_rows = round(2 ** draw.uniform(0, options.max_rows.bit_length() - 1))
        before, begin = engine.num_timings, time.monotonic()
        program, problem = search.program_for(num_rows)
        search_s, timings = time.monotonic() - begin, engine.num_timings - before
        check(engine, program, problem)
        ratios = []
        for _ in range(options.rounds):
            ours = engine.seconds(program, problem)
            ratios.append(timed(problem.one_dnn) / ours)
        shapes.append(
            {"rows": num_rows, "ratio": statistics.median(ratios), "timings": timings, "search_s": search_s}
            | {"program": vars(program)}
        )
    return {"dtype": dtype, "inputs": layer[0], "outputs": layer[1], "shapes": shapes}


def check(engine: Engine, program: Program, problem: Problem) -> None:
    engine.call(program, problem.a_MK, problem.panels(program.vectors), problem.c_MN)
    wanted = problem.a_MK.float() @ problem.w_NK.float().t()
    error = float((problem.c_MN - wanted).abs().max() / wanted.abs().max())
    assert error < 1e-4, f"{program} is wrong by {error:.1e} of the largest result"


BUCKETS = ((1, 4), (5, 16), (17, 64), (65, 256), (257, 1 << 20))


def lines(rows: list[dict], num_threads: int) -> list[str]:
    """oneDNN's time over ours by number of rows, and what the searches cost."""
    heads = [f"{low}-{high}" if high < 1 << 20 else f"{low}-" for low, high in BUCKETS]
    text = [
        f"oneDNN's time / the searched program's, {num_threads} threads: median by rows (above 1: searched is faster)",
        f"{'dtype':<10}{'in x out':<13}"
        + "".join(f"{head:>9}" for head in heads)
        + "   timings a shape, first / later",
    ]
    for row in rows:
        cells = []
        for low, high in BUCKETS:
            found = [s["ratio"] for s in row["shapes"] if low <= s["rows"] <= high]
            cells.append(f"{statistics.median(found):>9.2f}" if found else f"{'-':>9}")
        first, later = row["shapes"][:WINDOW], row["shapes"][WINDOW:]
        cost = " / ".join(
            f"{statistics.median(s['timings'] for s in part):.0f} ({sum(s['search_s'] for s in part):.0f} s in all)"
            for part in (first, later)
            if part
        )
        text.append(f"{row['dtype']:<10}{row['inputs']}x{row['outputs']:<8}" + "".join(cells) + f"   {cost}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", type=int, default=32, help="numbers of rows that arrive, per layer")
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="timings of either side, in turn, per shape")
    parser.add_argument("--layers", type=int, default=len(LAYERS), help="how many of GPT-2's layers")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    needed = {"float32": "avx512f", "bfloat16": "avx512_bf16"}
    flags = set(Path("/proc/cpuinfo").read_text().split())
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory(prefix="numadist-") as folder:
        for dtype in options.dtype:
            if needed[dtype] not in flags:
                print(f"no rows of {dtype}: this CPU has no {needed[dtype]}")
                continue
            engine = Engine(dtype, Path(folder))
            print(f"{dtype}: kernels compiled in {engine.compile_s:.0f} s", flush=True)
            rows += [measure(engine, dtype, layer, options) for layer in LAYERS[: options.layers]]
    print("\n".join(lines(rows, options.threads)))
    if options.json:
        Path(options.json).write_text(json.dumps({"threads": options.threads, "layers": rows}, indent=1))


if __name__ == "__main__":
    main()
