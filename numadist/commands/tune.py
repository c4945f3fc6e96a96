"""`numadist tune`: measure ranks and thread counts on the model's shape, and write the best as plan.json."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numadist.errors import PlanError
from numadist.log import get_logger
from numadist.phases.plan import PlanPair
from numadist.topology.machine import Machine
from numadist.topology.sysfs import read_machine
from numadist.topology.tree import build_tree, tree_key
from numadist.tune.search import GAIN, pair_of, rank_choices, score, smallest_good

log = get_logger(__name__)

LAYERS = 8  # as many as repeat a layer on weights that are not in the cache
# What a trial needs before it measures: torch, the model, its graph.
START_S = 12.0

Trial = tuple[tuple[tuple[int, ...], ...], dict[str, Any]]  # CPUs of the ranks, what they measured


def main(argv: Sequence[str]) -> int:
    """`numadist tune`; returns the exit code."""
    from numadist import models  # late: --help must not wait for torch

    parser = argparse.ArgumentParser(prog="numadist tune", description=__doc__)
    parser.add_argument(
        "--model", default="gpt2", choices=sorted(models.MODELS), help="whose shape (default gpt2)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"layers to measure (default {LAYERS})")
    parser.add_argument("--budget", type=float, default=60, metavar="S", help="seconds in all (default 60)")
    parser.add_argument("-o", "--output", default="plan.json", metavar="FILE", help="default plan.json")
    parser.add_argument("--force", action="store_true", help="measure although others use the CPUs")
    options = parser.parse_args(argv)
    machine = read_machine()
    check_idle(machine, options.force, os.getloadavg()[0])
    end = time.monotonic() + options.budget
    tree = build_tree(machine)
    trials: list[Trial] = []
    choices = list(rank_choices(machine, tree, models.config_of(options.model).num_attention_heads))
    for i, ranks in enumerate(choices):
        left = end - time.monotonic()
        if trials and left < START_S:
            print(f"{len(ranks)} ranks: not tried, {left:.0f} s of the budget are left")
            break
        trials.append((ranks, _run(ranks, options, left / (len(choices) - i))))
        print(_line(ranks, trials[-1][1]))
    plan = replace(choose(trials), topology_key=tree_key(tree), model=f"{options.model}, {options.dtype}")
    plan.save(options.output)
    threads = sorted({r.threads for r in plan.prefill.ranks}), sorted({r.threads for r in plan.decode.ranks})
    print(
        f"{options.output}: {len(plan.prefill.ranks)} ranks, threads a rank {threads[0]} for prefill and "
        f"{threads[1]} for decode; run it by numarun --plan {options.output}"
    )
    return 0


def check_idle(machine: Machine, force: bool, load: float) -> None:
    """Raises: PlanError where others use more than half of the cores, for times would say little."""
    if not force and load > len(machine.cores) / 2:
        raise PlanError(
            f"the load average is {load:.1f} on {len(machine.cores)} cores: what is measured now would not hold later. "
            "Wait, or use --force"
        )


def choose(trials: list[Trial]) -> PlanPair:
    """The best trial, in favour of the earlier ones, which have fewer ranks: others must gain 5 %."""

    def total(trial: dict[str, Any]) -> float:
        decode = min(score(times) for times in trial["decode"].values())
        return score({"prefill": trial["prefill_ms"], "decode": decode})

    best = 0
    for i, (_, trial) in enumerate(trials):
        if total(trial) < total(trials[best][1]) * (1 - GAIN):
            best = i
    ranks, trial = trials[best]
    threads = smallest_good({int(n): score(times) for n, times in trial["decode"].items()})
    rejected = [{"ranks": len(r), **t} for i, (r, t) in enumerate(trials) if i != best]
    return replace(pair_of(ranks, threads), measured=trial, rejected=tuple(rejected))


def _run(ranks: tuple[tuple[int, ...], ...], options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """What a job of these ranks measures. Raises: PlanError if it fails."""
    with tempfile.TemporaryDirectory(prefix="numadist_tune_") as folder:
        plan, out = Path(folder) / "trial.json", Path(folder) / "out.json"
        pair_of(ranks).save(plan)
        launcher = [sys.executable, "-m", "numadist.launch.cli", "--quiet", "--plan", str(plan)]
        words = [options.model, options.dtype, str(options.layers), f"{left_s - START_S:.1f}", str(out)]
        command = [*launcher, "-m", "numadist.tune.worker", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not out.exists():
            last = "\n".join((done.stderr or done.stdout).splitlines()[-5:])
            raise PlanError(f"the trial with {len(ranks)} ranks ended with code {done.returncode}:\n{last}")
        return json.loads(out.read_text())


def _line(ranks: tuple[tuple[int, ...], ...], trial: dict[str, Any]) -> str:
    decode = ", ".join(
        f"{n} threads {times['b1_ms']:.2f} / {times['b8_ms']:.2f}" for n, times in trial["decode"].items()
    )
    return f"{len(ranks)} ranks: prefill {trial['prefill_ms']:.1f} ms; decode of 1 / 8 rows, ms: {decode}"
