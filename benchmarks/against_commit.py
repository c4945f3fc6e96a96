"""Steady speed of this checkout against another commit's: time to the first token and of a step, in turn.

    python benchmarks/against_commit.py HEAD~20 --model smollm2 --shapes 1x128 1x512 8x512 --rounds 5

Both are compiled (benchmarks/start.py says how long that takes) and stay in memory; then each measures when it is told,
one after the other. A shape is rows x tokens of a prompt. The commit is built in a folder of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from numadist.compare.statistics import Timing, ratio

HERE = Path(__file__).resolve().parents[1]
Times = dict[str, tuple[float, float]]  # of a shape: ms to the first tokens, and of a step


def main() -> None:
    options = parse_options()
    if options.rank:
        return rank_main(options)
    with ExitStack() as stack:
        old = stack.enter_context(checkout(options.commit))
        jobs = {name: Job(stack, root, options) for name, root in (("old", old), ("new", HERE))}
        found: dict[str, list[Times]] = {name: [] for name in jobs}
        for _ in range(options.rounds):
            for name, job in jobs.items():
                found[name].append(job.measure())
    for shape in options.shapes:
        for place, what in enumerate(("prompt", "decode")):
            old_ms, new_ms = (Timing([times[shape][place] for times in found[name]]) for name in found)
            seen = ratio(new_ms, old_ms)
            print(
                f"{shape} {what}: old {old_ms.median_ms:.2f} ms, new {new_ms.median_ms:.2f}, "
                f"new/old {seen.median:.3f} ({seen.low:.3f}-{seen.high:.3f})"
            )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=["1x128", "1x512", "8x512"])
    parser.add_argument("--tokens", type=int, default=24, help="decoded in a round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The commit's files with its core built."""
    with tempfile.TemporaryDirectory(prefix="numadist-commit-") as folder:
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=folder, check=True)
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


class Job:
    """Ranks of one checkout, which measure whenever a file asks them to, and answer by another."""

    def __init__(self, stack: ExitStack, root: Path, options: argparse.Namespace):
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="numadist-steady-")))
        self.rounds = 0
        command = [sys.executable, "-m", "numadist.launch.cli", "--quiet", "--nproc-per-node", options.ranks]
        command += [__file__, *sys.argv[1:], "--rank", self.folder]
        kept = {
            "TORCHINDUCTOR_CACHE_DIR": self.folder / "inductor",
            "NUMADIST_CACHE_DIR": self.folder / "kept",
        }
        env = {**os.environ, "PYTHONPATH": str(root), **{name: str(path) for name, path in kept.items()}}
        self.process = subprocess.Popen(list(map(str, command)), env=env, cwd=root)
        stack.callback(self.process.wait)
        stack.callback((self.folder / "stop").touch)
        self.measure()  # compiled, recorded

    def measure(self) -> Times:
        self.rounds += 1
        answer = self.folder / f"answer-{self.rounds}"
        (self.folder / f"ask-{self.rounds}").touch()
        while not answer.exists():
            if self.process.poll() is not None:
                sys.exit("the ranks ended")
            time.sleep(0.02)
        times: Times = json.loads(answer.read_text())
        return times


def rank_main(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import numadist
    from numadist import models

    dist.init_process_group("numa")
    shapes = {shape: tuple(map(int, shape.split("x"))) for shape in options.shapes}
    generator = numadist.Generator(
        models.build(options.model, getattr(torch, options.dtype)),
        max_batch_size=max(rows for rows, _ in shapes.values()),
        max_length=max(length for _, length in shapes.values()) + options.tokens + 1,
        compile=True,
    )

    def measure(rows: int, length: int) -> tuple[float, float]:
        prompts = [[1 + (7 * i + 13 * row) % 1000 for i in range(length)] for row in range(rows)]
        times = []
        begin = time.perf_counter()
        generator.generate(
            prompts,
            max_new_tokens=options.tokens + 1,
            eos_token_id=(),
            on_token=lambda row, token: times.append(time.perf_counter()),
        )
        if not times:  # a rank that tells nobody
            return 0.0, 0.0
        first = times[rows - 1]
        return 1e3 * (first - begin), 1e3 * (times[-1] - first) / options.tokens

    folder, number = Path(options.rank), 1
    for shape in shapes.values():
        for _ in range(2):
            measure(*shape)
    while not (folder / "stop").exists():
        if not (folder / f"ask-{number}").exists():
            time.sleep(0.02)
            continue
        found = {name: measure(*shape) for name, shape in shapes.items()}
        if dist.get_rank() == 0:
            (folder / "writing").write_text(json.dumps(found))
            (folder / "writing").rename(folder / f"answer-{number}")
        number += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
