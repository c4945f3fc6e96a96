"""`numadist compare`: does it pay, for this model and these shapes, on this machine?"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from numadist import models
from numadist.compare import report
from numadist.compare.rounds import QUICK, Case, Protocol, measure_case
from numadist.compare.variants import VARIANTS, Variant, chosen
from numadist.compare.worker import Worker
from numadist.topology.machine import Machine
from numadist.topology.sysfs import read_machine


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    machine = read_machine()
    protocol = QUICK if options.quick else Protocol()
    vocabulary = models.vocabulary_size(options.model)
    shapes = [(b, s) for b in options.batch for s in options.seq]
    progress = Progress(len(shapes))
    cases = []
    with ExitStack() as stack:
        workers = {}
        for variant in chosen(options.variants):
            progress(f"starting {variant.name}")
            worker = start(variant, options, machine)
            stack.callback(worker.close)
            workers[variant.name] = worker
        for batch, seq in shapes:
            case = measure_case(workers, batch, seq, vocabulary, options.dtype, protocol, progress)
            progress.case_done()
            print("\n".join(report.case_lines(case)), flush=True)
            cases.append(case)
    print("\n".join(report.summary_lines(cases)))
    _write(options, cases, machine)
    return 0 if not any(case.failed for case in cases) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="numadist compare", description=__doc__)
    parser.add_argument(
        "--model", default="gpt2", choices=models.NAMES, metavar="M", help=", ".join(models.NAMES)
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--seq", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--variants", nargs="+", metavar="V", help=f"default all: {', '.join(VARIANTS)}")
    parser.add_argument(
        "--nproc-per-socket", type=int, metavar="K", help="ranks; default one per NUMA node, at least two"
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 warm-up and 10 timed forwards instead of 10 and 50"
    )
    parser.add_argument("--json", metavar="FILE", help="all rows, with the median of every round")
    parser.add_argument("--plot", metavar="FILE.png", help="heat maps of the speed-up, batch by sequence")
    return parser


class Progress:
    """One line on stderr, rewritten: what runs, done of total, time left."""

    def __init__(self, num_cases: int):
        self.num_cases, self.done = num_cases, 0
        self.begin = time.monotonic()

    def __call__(self, what: str) -> None:
        left = ""
        if self.done:
            seconds = (time.monotonic() - self.begin) / self.done * (self.num_cases - self.done)
            left = f", about {seconds / 60:.0f} min left"
        text = f"{self.done}/{self.num_cases} shapes{left}: {what}"
        if sys.stderr.isatty():
            print(f"\x1b[2K{text}", end="\r", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def case_done(self) -> None:
        self.done += 1


def start(variant: Variant, options: argparse.Namespace, machine: Machine) -> Worker:
    """The variant's processes on this machine: one thread a core, as numarun gives its ranks. Raises: NumadistError."""
    domains = machine.domains if variant.all_nodes else machine.domains[:1]
    cpus = [core.cpus[0] for domain in domains for core in domain.cores]
    nodes = sorted({n for domain in domains for n in machine.memory_of(domain.nodes)})
    numarun = []
    if options.nproc_per_socket:
        numarun = ["--nproc-per-socket", str(options.nproc_per_socket)]
    elif len(machine.domains) < 2:  # a machine with one node still shows what packing and fewer barriers give
        numarun = ["--nproc-per-node", "2"]
    return Worker(variant.name, options.model, options.dtype, cpus, nodes, numarun)


def _write(options: argparse.Namespace, cases: list[Case], machine: Machine) -> None:
    if options.json:
        setting = report.setting_of(options.model, options.dtype, len(machine.cores))
        report.write_json(options.json, report.to_json(cases, setting))
    if options.plot:
        report.plot(options.plot, cases, f"{options.model}, {options.dtype}")
