"""Run a program of a client over a backend and read what it says.

A program prints one line `RESULT json`. Over numa the program is the same: a variable has groups of gloo replaced, and
the trace proves that collectives went through ours.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 600  # only a hang reaches it
# torch 2.13's Gloo can abort a rank at interpreter exit, after the program's last line.
GLOO_ABORT = "terminate called without an active exception"
NUMARUN = (sys.executable, "-m", "numadist.launch.cli", "--quiet", "--nproc-per-node", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Failed(Exception):
    """A program that ended with an error, or said nothing; the text is what it wrote last."""

    @property
    def reason(self) -> str:
        """The last line that names an error or a signal."""
        lines = [line.strip() for line in str(self).splitlines() if re.search(r"\w+Error\b|Signal \d", line)]
        return lines[-1] if lines else "it says no reason"


def environment(backend: str, folder: Path, **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMADIST_")}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(PROGRAMS)}
    if found := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += f":{found}"
    if backend == "numa":
        folder.mkdir(parents=True, exist_ok=True)
        env |= {"NUMADIST_BACKEND": "numa", "NUMADIST_TRACE": str(folder / "trace")}
    return env | more


def result_of(command: Sequence[str], backend: str, folder: Path, **variables: str) -> Any:
    """What the program of a command says over a backend. folder: for this run alone. Raises: Failed."""
    env = environment(backend, folder, **variables)
    done = subprocess.run(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=LIMIT_S
    )
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    aborted_at_exit = backend == "gloo" and GLOO_ABORT in done.stdout
    if (done.returncode and not aborted_at_exit) or not lines:
        raise Failed(
            f"{' '.join(command)} over {backend} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        )
    if backend == "numa" and not num_traced(folder):
        raise Failed(f"{' '.join(command)}: no collective went through numadist:\n{done.stdout[-6000:]}")
    return json.loads(lines[0])


def num_traced(folder: Path) -> int:
    """Collectives of all processes of a run over numa."""
    return sum(row["calls"] for path in folder.glob("trace.*.json") for row in json.loads(path.read_text()))


def ranks_say(program: str, backend: str, folder: Path, *args: str, num_ranks: int = 2) -> Any:
    """programs/run.py of a program: two ranks under numarun, four under torchrun, which lets ranks share cores."""
    start = NUMARUN if num_ranks == 2 else (*TORCHRUN, str(num_ranks))
    return result_of((*start, str(PROGRAMS / "run.py"), program, *args), backend, folder)


def over_both(program: str, folder: Path, *args: str) -> dict[str, Any]:
    """Backend -> what a program that makes its own group says on two ranks under numarun."""
    command = (*NUMARUN, str(PROGRAMS / program), *args)
    return {backend: result_of(command, backend, folder / backend) for backend in ("gloo", "numa")}
