"""Is our linear layer of few rows faster than oneDNN on the same packed weights, read from memory?

    python benchmarks/skinny_linear.py [--dtype float32] [--threads N] [--out FILE]

Every call reads another copy of the weights, as a model's layers do, from a set larger than the cache. Both take
turns; times are medians over rounds of the smallest of a round. Prints a table of microseconds and ratios.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from numadist._native import supported_isas
from numadist.kernels import skinny

SHAPES = {
    "gpt2 qkv": (2304, 768),
    "gpt2 out": (768, 768),
    "gpt2 up": (3072, 768),
    "gpt2 down": (768, 3072),
    "gpt2 head": (50257, 768),
    "smollm2 kv": (192, 576),
    "smollm2 up": (1536, 576),
    "llama-1b q": (2048, 2048),
    "llama-1b kv": (512, 2048),
    "llama-1b up": (8192, 2048),
    "llama-1b down": (2048, 8192),
}
ROWS = (1, 2, 4, 8, 16)
SET_BYTES = 192 << 20  # six times the last-level cache of the machine in results/


def weights(num_out: int, num_in: int, dtype: torch.dtype) -> list[Tensor]:
    count = max(2, min(256, SET_BYTES // (dtype.itemsize * num_out * num_in)))
    w_NK = torch.randn(num_out, num_in, dtype=dtype)
    return [torch.ops.mkldnn._reorder_linear_weight(w_NK, 128) for _ in range(count)]


def time_us(call: Callable[[Tensor], Tensor], blobs: list[Tensor]) -> float:
    """Of one call, over one pass of all copies."""
    begin = time.perf_counter()
    for blob in blobs:
        call(blob)
    return (time.perf_counter() - begin) / len(blobs) * 1e6


def compare(blobs: list[Tensor], isa: int, rows: int, rounds: int) -> dict[str, float]:
    num_out, num_in = blobs[0].shape
    width = skinny.panel_width(blobs[0])
    if width is None:
        raise SystemExit(f"{num_out} x {num_in}: packed in a layout that this CPU has no fast kernel for")
    x_MK = torch.randn(rows, num_in, dtype=blobs[0].dtype)
    onednn = torch.ops.mkldnn._linear_pointwise.default
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "onednn_us": lambda blob: onednn(x_MK, blob, None, "none", [], ""),
        "ours_us": lambda blob: skinny.skinny_linear(x_MK, blob, None, num_out, width, isa),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in calls if i % 2 else reversed(calls):
            times[name].append(min(time_us(calls[name], blobs) for _ in range(2)))
    result = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(times["onednn_us"], times["ours_us"], strict=True)
    return {**result, "ratio": statistics.median(theirs / own for theirs, own in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    isas = supported_isas()
    parser.add_argument("--isa", default=isas[0], choices=isas, help="ONEDNN_MAX_CPU_ISA sets oneDNN's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{options.dtype}, {options.isa}, threads {options.threads}", end=": ")
    print("microseconds of oneDNN / ours (ratio above 1: ours is faster)")
    print(f"{'layer':<15}{'N x K':<13}" + "".join(f"{f'M={rows}':>22}" for rows in ROWS))
    results = []
    for name, (num_out, num_in) in SHAPES.items():
        blobs = weights(num_out, num_in, getattr(torch, options.dtype))
        isa = isas.index(options.isa)
        found = {rows: compare(blobs, isa, rows, options.rounds) for rows in ROWS}
        cells = (f"{r['onednn_us']:.0f} / {r['ours_us']:.0f} ({r['ratio']:.2f})" for r in found.values())
        print(
            f"{name:<15}{f'{num_out} x {num_in}':<13}" + "".join(f"{cell:>22}" for cell in cells), flush=True
        )
        results += [{"layer": name, "n": num_out, "k": num_in, "m": m, **r} for m, r in found.items()]
    if options.out:
        setting = {
            "dtype": options.dtype,
            "isa": options.isa,
            "threads": options.threads,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({**setting, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
