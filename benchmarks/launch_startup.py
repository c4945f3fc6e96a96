"""How long does an empty script take under numarun and under torchrun?

    python benchmarks/launch_startup.py --runs 9 --json out.json

Wall time of the whole command with two ranks, the two launchers in turn, so that both see the same noise.
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

COMMANDS = {
    "numarun": [sys.executable, "-m", "numadist.launch.cli", "--quiet", "--nproc-per-node", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def measure(runs: int) -> dict[str, list[float]]:
    """Launcher -> seconds of each run, interleaved, after one run of each that fills the bytecode caches."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.write_text("")
        for _ in range(runs + 1):
            for name, command in COMMANDS.items():
                began = time.perf_counter()
                subprocess.run([*command, str(script)], check=True, capture_output=True, env=environ)
                seconds[name].append(time.perf_counter() - began)
    return {name: s[1:] for name, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows = [
        {"system": name, "runs": len(s), "median_s": statistics.median(s), "min_s": min(s), "max_s": max(s)}
        for name, s in measure(options.runs).items()
    ]
    for row in rows:
        spread = f"{row['min_s']:.3f}-{row['max_s']:.3f}"
        print(f"{row['system']:<10} median {row['median_s']:.3f} s  ({spread}, {row['runs']} runs)")
    print(f"torchrun / numarun: {rows[1]['median_s'] / rows[0]['median_s']:.1f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
