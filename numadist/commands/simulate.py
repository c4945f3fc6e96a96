"""`numadist simulate`: predicted speed-ups of sharding a model on a machine nobody here has."""

import argparse
from collections.abc import Sequence

import torch

from numadist import models
from numadist.costmodel.presets import PRESETS
from numadist.costmodel.price import process_s, sharded_s
from numadist.costmodel.profile import MachineProfile
from numadist.costmodel.software import NUMA_TORCH, SOFTWARE, Software
from numadist.simulate.models import ModelWork

_NOTES = {
    "numa-torch": "the system of arXiv 2611.07105 against its own baseline; errors: docs/simulator.md",
    "numadist": "this package against torch.compile with packed weights; NOT validated: no such machine was measured",
}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    machine = MachineProfile.load(options.profile) if options.profile else PRESETS[options.machine]
    software = SOFTWARE[options.software]
    work = ModelWork(options.model, max(2, *options.seq), getattr(torch, options.dtype))
    print("\n".join(table(work, machine, software, options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="numadist simulate", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--machine", choices=list(PRESETS), help="a preset")
    where.add_argument("--profile", metavar="FILE", help="a profile written by `numadist profile --json`")
    parser.add_argument("--model", required=True, choices=list(models.MODELS), metavar="M")
    parser.add_argument("--seq", type=_numbers, metavar="N[,N]", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--batch", type=_numbers, metavar="N[,N]", default=[1, 2, 4, 8])
    parser.add_argument("--ranks", type=int, help="default one per NUMA node, at least two")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--software",
        default=NUMA_TORCH.name,
        choices=list(SOFTWARE),
        help="; ".join(map(": ".join, _NOTES.items())),
    )
    return parser


def table(
    work: ModelWork, machine: MachineProfile, software: Software, options: argparse.Namespace
) -> list[str]:
    """Speed-up over one process without a memory policy: a line a sequence, a column a batch."""
    ranks = options.ranks or max(2, machine.nodes)
    lines = [
        f"SIMULATION: {options.model}, {options.dtype}, {machine.name} ({machine.nodes} nodes of "
        f"{machine.cores_per_node} cores), {ranks} ranks",
        f"{software.name}: {_NOTES[software.name]}",
        "speed-up (predicted milliseconds of one process -> sharded)",
        "sequence".rjust(9) + "".join(f"batch {batch}".rjust(28) for batch in options.batch),
    ]
    for seq in options.seq:
        cells = []
        for batch in options.batch:
            counted = work.work(ranks, batch, seq, software)
            one, split = process_s(counted, machine, software), sharded_s(counted, machine, software)
            cells.append(f"{one / split:.2f} ({1e3 * one:.1f} -> {1e3 * split:.1f})".rjust(28))
        lines.append(f"{seq:>9}" + "".join(cells))
    return lines


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers
