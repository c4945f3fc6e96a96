"""`numadist explain MODEL`: how a model would be sharded, without starting a rank."""

import argparse
from collections.abc import Sequence
from typing import Literal

import torch

from numadist import models
from numadist.costmodel.measure import kept_profile
from numadist.costmodel.presets import PRESETS
from numadist.kernels import half
from numadist.pipeline.explain import explain


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="numadist explain", description=__doc__)
    parser.add_argument(
        "model",
        help=f"{', '.join(models.NAMES)}, or module:function; function(batch=, seq=) returns (model, keyword inputs)",
    )
    parser.add_argument("--ranks", type=int, help="default 2; with --auto one a node, at least 2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--auto",
        nargs="?",
        const=True,  # a string would have to be one of the choices
        choices=list(PRESETS),
        metavar="MACHINE",
        help="show what ranks='auto', blocks='auto' chooses: on this machine (`numadist profile`), or one of "
        + ", ".join(PRESETS),
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="show what sequence_parallel=True makes of it"
    )
    parser.add_argument(
        "--quantization",
        choices=["int8", "int4"],
        help="show the bytes and costs of weights rounded to codes",
    )
    options = parser.parse_args(argv)
    profile = None
    if options.auto is not None:
        profile = kept_profile() if options.auto is True else PRESETS[options.auto]
    dtype = getattr(torch, options.dtype)
    model, inputs = models.workload(options.model, options.batch, options.seq, dtype)
    auto: Literal["auto"] | None = "auto" if options.auto is not None else None
    text = explain(
        model,
        inputs,
        options.ranks,
        ranks=auto,
        blocks=auto,
        profile=profile,
        sequence_parallel=options.sequence_parallel,
        quantization=options.quantization,
    )
    print(text)
    print(f"compile=True on this machine: {half.kernel_name(dtype)}")
    return 0
