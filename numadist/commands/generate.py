"""`numadist generate`: continue a prompt with a model file, on ranks that it starts itself, one a NUMA node."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from numadist.errors import GenerateError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """Of `numadist generate`, and of its ranks, which get the same words."""
    made = argparse.ArgumentParser(prog="numadist generate", description=__doc__)
    made.add_argument("model", metavar="MODEL", help="a folder as Hugging Face saves models, or a .gguf file")
    made.add_argument("--prompt", metavar="TEXT", help="what to continue; without it, all of standard input")
    made.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    made.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token"
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws with a temperature")
    made.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message, by the file's template"
    )
    made.add_argument("--ranks", type=int, metavar="N", help="default one a NUMA node")
    made.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="auto: the folder's own; float32 of a .gguf"
    )
    made.add_argument(
        "--quantization",
        choices=("auto", "none", "int8", "int4"),
        default="auto",
        help="auto: weights as the file has them; none: widened; int8, int4: rounded while they are loaded",
    )
    made.add_argument(
        "--compile", action="store_true", help="faster tokens, but the first one waits for a compiler"
    )
    made.add_argument(
        "--quiet", action="store_true", help="do not tell what takes long before the first token"
    )
    made.add_argument(
        "--stats", action="store_true", help="times, bytes and pages of the ranks, to standard error"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """`numadist generate`; becomes numarun, and returns only for words that are wrong. Raises: GenerateError."""
    options = parser().parse_args(argv)
    if not Path(options.model).exists():
        raise GenerateError(f"{options.model} is not there")
    for name, least in (("--max-new-tokens", 1), ("--ranks", 1), ("--temperature", 0)):
        value = getattr(options, name[2:].replace("-", "_"))
        if value is not None and value < least:
            raise GenerateError(f"{name} must be at least {least}, got {value}")
    count = ["--nproc-per-node", str(options.ranks)] if options.ranks else []
    # Rank 0 alone speaks: its text, as it comes.
    launcher = [
        sys.executable,
        "-m",
        "numadist.launch.cli",
        "--quiet",
        *([] if options.quiet else ["--env", "NUMADIST_PROGRESS=auto"]),
        "--prefix",
        "never",
        "--ranks",
        "0",
        *count,
    ]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "numadist.commands.generate_rank", *argv])
