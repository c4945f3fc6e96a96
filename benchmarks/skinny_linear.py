"""Is our linear layer of few rows faster than oneDNN on the same packed weights, read from memory?

    python benchmarks/skinny_linear.py [--dtype float32] [--threads N] [--out FILE]
    python benchmarks/skinny_linear.py --halves [--dtype float16] ...

--halves: our layers on weights of 16 bits in panels of ours against the same layers in f32, ours up to 16 rows and
oneDNN's from there on, as CPUs without AVX512-BF16 have them.

Every call reads another copy of the weights, as a model's layers do, from a set larger than the cache. Both take turns;
times are medians over rounds of the smallest of a round. Prints a table of microseconds and ratios.
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
from numadist.kernels import half, skinny

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
PROMPT_ROWS = (128, 512)
SET_BYTES = 192 << 20  # six times the last-level cache of the machine in results/


def copies(num_out: int, num_in: int, dtype: torch.dtype) -> int:
    return max(2, min(256, SET_BYTES // (dtype.itemsize * num_out * num_in)))


def packed(num_out: int, num_in: int, dtype: torch.dtype) -> list[Tensor]:
    """Copies of one layer's weights as oneDNN packs them."""
    w_NK = torch.randn(num_out, num_in, dtype=dtype)
    return [torch.ops.mkldnn._reorder_linear_weight(w_NK, 128) for _ in range(copies(num_out, num_in, dtype))]


def halves(num_out: int, num_in: int, dtype: torch.dtype) -> list[Tensor]:
    """The same in panels of ours."""
    w_NK = torch.randn(num_out, num_in).to(dtype)
    return [half.pack(w_NK) for _ in range(copies(num_out, num_in, dtype))]


def width_of(blob: Tensor) -> int:
    width = skinny.panel_width(blob)
    if width is None:
        raise SystemExit(f"{list(blob.shape)}: packed in a layout that this CPU has no fast kernel for")
    return width


def time_us(call: Callable[[Tensor], Tensor], blobs: list[Tensor]) -> float:
    """Of one call, over one pass of all copies."""
    begin = time.perf_counter()
    for blob in blobs:
        call(blob)
    return (time.perf_counter() - begin) / len(blobs) * 1e6


def compare_packed(
    num_out: int, num_in: int, options: argparse.Namespace, isa: int
) -> dict[int, dict[str, float]]:
    """By rows: oneDNN's time and ours on the same weights."""
    dtype = getattr(torch, options.dtype)
    blobs = packed(num_out, num_in, dtype)
    width = width_of(blobs[0])
    onednn = torch.ops.mkldnn._linear_pointwise.default

    def compare(rows: int) -> dict[str, float]:
        x_MK = torch.randn(rows, num_in, dtype=dtype)
        calls = {
            "onednn_us": (lambda blob: onednn(x_MK, blob, None, "none", [], ""), blobs),
            "ours_us": (lambda blob: skinny.skinny_linear(x_MK, blob, None, num_out, width, isa), blobs),
        }
        return take_turns(calls, options.rounds)

    return {rows: compare(rows) for rows in ROWS}


def compare_halves(
    num_out: int, num_in: int, options: argparse.Namespace, isa: int
) -> dict[int, dict[str, float]]:
    """By rows: the time in f32, and ours on weights of 16 bits."""
    dtype = getattr(torch, options.dtype)
    wide, narrow = packed(num_out, num_in, torch.float32), halves(num_out, num_in, dtype)
    width = width_of(wide[0])
    onednn = torch.ops.mkldnn._linear_pointwise.default

    def compare(rows: int) -> dict[str, float]:
        x_MK = torch.randn(rows, num_in)
        x16_MK = x_MK.to(dtype)

        def in_f32(blob: Tensor) -> Tensor:
            if rows > skinny.MAX_ROWS:
                return onednn(x_MK, blob, None, "none", [], "")
            return skinny.skinny_linear(x_MK, blob, None, num_out, width, isa)

        calls = {
            "f32_us": (in_f32, wide),
            "ours_us": (lambda panels: half.half_linear(x16_MK, panels, None, num_out, isa), narrow),
        }
        return take_turns(calls, options.rounds)

    return {rows: compare(rows) for rows in ROWS + PROMPT_ROWS}


def take_turns(
    calls: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]], rounds: int
) -> dict[str, float]:
    """Medians of both, and the median ratio inside a round: the first one's time over the second's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in calls if i % 2 else reversed(calls):
            call, blobs = calls[name]
            times[name].append(min(time_us(call, blobs) for _ in range(2)))
    result = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(*times.values(), strict=True)
    return {**result, "ratio": statistics.median(theirs / own for theirs, own in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--halves", action="store_true")
    isas = supported_isas()
    parser.add_argument("--isa", default=isas[0], choices=isas, help="ONEDNN_MAX_CPU_ISA sets oneDNN's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{options.dtype}, {options.isa}, threads {options.threads}", end=": ")
    print(f"microseconds of {'f32' if options.halves else 'oneDNN'} / ours (ratio above 1: ours is faster)")
    columns = ROWS + PROMPT_ROWS if options.halves else ROWS
    print(f"{'layer':<15}{'N x K':<13}" + "".join(f"{f'M={rows}':>22}" for rows in columns))
    results = []
    for name, (num_out, num_in) in SHAPES.items():
        compare = compare_halves if options.halves else compare_packed
        found = compare(num_out, num_in, options, isas.index(options.isa))
        cells = (f"{a:.0f} / {b:.0f} ({ratio:.2f})" for a, b, ratio in (r.values() for r in found.values()))
        print(
            f"{name:<15}{f'{num_out} x {num_in}':<13}" + "".join(f"{cell:>22}" for cell in cells), flush=True
        )
        results += [{"layer": name, "n": num_out, "k": num_in, "m": m, **r} for m, r in found.items()]
    if options.out:
        setting = {
            "dtype": options.dtype,
            "isa": options.isa,
            "halves": options.halves,
            "threads": options.threads,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({**setting, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
