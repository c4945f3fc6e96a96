"""Prefill on ranks beside torch.compile and OpenVINO in one process each: the table of results/prefill.md.

    python benchmarks/prefill.py --json prefill.json
    python benchmarks/prefill.py --dtype float32 --model gpt2,smollm2 --batch 1 --seq 128,512 --max-isa avx2

One command for all shapes, by default 5 models at 1 and 8 sequences of 128, 512 and 1024 tokens: `numadist compare`
measures them, with its own protocol, and its rows become the table's. The JSON grows with each shape. With --max-isa
all systems run as on an older CPU; older_cpu.py has what that means for whom.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from older_cpu import LIMITS, limited

from numadist.compare.statistics import Ratio, Timing, geometric_mean, ratio

BASELINE, OURS, PEER = "compile", "ranks", "openvino"
MODELS = "gpt2,gpt2-medium,bert-large,gemma3-270m,smollm2"


def main() -> int:
    options, others = parse_options()
    environment = dict(os.environ)
    if options.max_isa:
        environment |= limited(options.max_isa)
    with tempfile.TemporaryDirectory(prefix="numadist-") as folder:
        file = Path(options.json or Path(folder) / "prefill.json")
        command = [sys.executable, "-m", "numadist", "compare", "--quick", "--json", str(file)]
        command += ["--variants", f"{OURS},{PEER}", "--skip-above", str(options.skip_above)]
        command += ["--model", options.model, "--batch", options.batch, "--seq", options.seq]
        done = subprocess.run([*command, "--dtype", options.dtype, *others], env=environment)
        rows = json.loads(file.read_text()) if file.exists() else []
    print("\n".join(table(rows)))
    return done.returncode


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """The options, and others for `numadist compare`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODELS, metavar="M[,M]")
    parser.add_argument("--batch", default="1,8", metavar="N[,N]")
    parser.add_argument("--seq", default="128,512,1024", metavar="N[,N]")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--max-isa", choices=LIMITS, help="measure all systems as on a CPU that has no more")
    parser.add_argument(
        "--skip-above", type=float, default=3600, metavar="SECONDS", help="skip a shape that takes longer"
    )
    parser.add_argument("--json", metavar="FILE", help="keep all rows")
    options, others = parser.parse_known_args()
    if options.max_isa and options.dtype != "float32":
        parser.error("--max-isa is for float32: OpenVINO refuses bfloat16 under a limit")
    return options, others


def table(rows: Iterable[dict]) -> list[str]:
    """Markdown: a line a shape, and the means."""
    lines = [
        "",
        "| model | batch x tokens | one process, ms | OpenVINO, ms | ranks, ms | over one process | over OpenVINO |",
        "|---|---|---|---|---|---|---|",
    ]
    over: dict[str, list[float]] = {BASELINE: [], PEER: []}
    for (model, batch, seq), group in groupby(rows, key=lambda row: (row["model"], row["batch"], row["seq"])):
        found = list(group)
        times = {row["variant"]: Timing(row["rounds_ms"]) for row in found if "rounds_ms" in row}
        if OURS not in times:
            reasons = {str(row.get(key)) for row in found for key in ("skipped", "failed") if row.get(key)}
            lines.append(f"| {model} | {batch} x {seq} | no row: {'; '.join(sorted(reasons))} | | | | |")
            continue
        cells = [f"{times[name].median_ms:.0f}" if name in times else "-" for name in (BASELINE, PEER, OURS)]
        for name in over:
            speed = ratio(times[name], times[OURS]) if name in times else None
            cells.append(shown(speed))
            over[name] += [speed.median] if speed else []
        lines.append(f"| {model} | {batch} x {seq} | {' | '.join(cells)} |")
    for name, speeds in over.items():
        if speeds:
            mean, least = geometric_mean(speeds), min(speeds)
            lines += ["", f"Over {name}, {len(speeds)} shapes: geometric mean {mean:.2f}, worst {least:.2f}."]
    return lines


def shown(speed: Ratio | None) -> str:
    return f"{speed.median:.2f} [{speed.low:.2f}-{speed.high:.2f}]" if speed else "-"


if __name__ == "__main__":
    sys.exit(main())
