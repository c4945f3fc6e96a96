"""`numadist compare`: does it pay, for this model and these shapes, on this machine?"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from numadist import models
from numadist.compare import report
from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.profiles import DEFAULT, PAPER, QUICK, SMALL, Profile
from numadist.compare.rounds import Case, measure_case
from numadist.compare.variants import REFERENCE, VARIANTS, Variant, chosen, missing
from numadist.compare.worker import Worker
from numadist.topology.machine import Machine
from numadist.topology.sysfs import read_machine


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    machine = read_machine()
    profile: Profile = options.profile
    if options.skip_above is not None:
        profile = replace(profile, skip_s=options.skip_above)
    plan = [(model, _shapes(options)) for model in options.model or profile.models]
    for model, _ in plan:
        models.check_name(model)
    absent = missing(options.llama_python)
    variants = chosen(options.variants, absent)
    if options.variants is None:
        print("".join(f"no row of {name}: {what}\n" for name, what in absent.items()), end="")
    progress = Progress(sum(len(shapes) for _, shapes in plan))
    cases: list[Case] = []
    for model, shapes in plan:
        subject = ModelUnderTest(model, options.dtype, max(seq for _, seq in shapes))
        with ExitStack() as stack:
            workers = {}
            for variant in variants:
                progress(f"{model}: starting {variant.name}")
                workers[variant.name] = worker = start(variant, subject, options, machine)
                stack.callback(worker.close)
            for batch, seq in shapes:
                case = Case(model, batch, seq)
                measure_case(workers, case, options.dtype, profile, progress)
                progress.case_done()
                print("\n".join(report.case_lines(case)), flush=True)
                cases.append(case)
                _write(
                    options, cases, machine
                )  # after every case: a long run that is stopped keeps what it has
    print("\n".join(report.summary_lines(cases)))
    if options.plot:
        report.plot(options.plot, cases, options.dtype)
    return 0 if not any(case.failed for case in cases) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="numadist compare", description=__doc__)
    parser.add_argument(
        "--model",
        type=_words,
        metavar="M[,M]",
        help=f"{', '.join(models.NAMES)}, or module:function; function(batch=, seq=) returns (model, keyword inputs)",
    )
    parser.add_argument("--batch", type=_numbers, metavar="N[,N]")
    parser.add_argument("--seq", type=_numbers, metavar="N[,N]")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--variants", type=_words, metavar="V[,V]", help=f"default all: {', '.join(VARIANTS)}"
    )
    parser.add_argument(
        "--nproc-per-socket", type=int, metavar="K", help="ranks; default one per NUMA node, at least two"
    )
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter that has llama-cpp-python, for the variant llama.cpp; default this one",
    )
    parser.set_defaults(profile=DEFAULT)
    for name, profile in {"quick": QUICK, "small": SMALL, "paper": PAPER}.items():
        parser.add_argument(
            f"--{name}", dest="profile", action="store_const", const=profile, help=_described(profile)
        )
    parser.add_argument(
        "--skip-above",
        type=float,
        metavar="SECONDS",
        help="skip a shape whose fewest rounds would take longer; default the profile's: "
        f"{QUICK.skip_s} with --quick, {SMALL.skip_s} with --small, else {DEFAULT.skip_s}",
    )
    parser.add_argument("--json", metavar="FILE", help="all rows, with the median of every round")
    parser.add_argument("--plot", metavar="FILE.png", help="heat maps of the speed-up, batch by sequence")
    return parser


def _described(profile: Profile) -> str:
    return (
        f"{profile.warm_up} warm-up and up to {profile.rounds * profile.per_round} timed forwards; "
        f"unless named otherwise {', '.join(profile.models)} at {len(profile.shapes)} shapes"
    )


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in _words(text)]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def _shapes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """All pairs of --batch and --seq, or the profile's shapes where neither is given."""
    shapes = options.profile.shapes
    if options.batch is None and options.seq is None:
        return list(shapes)
    batches = options.batch or sorted({batch for batch, _ in shapes})
    return [(b, s) for b in batches for s in options.seq or sorted({seq for _, seq in shapes})]


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


def start(variant: Variant, subject: ModelUnderTest, options: argparse.Namespace, machine: Machine) -> Worker:
    """The variant's processes: one thread a core, as numarun gives its ranks. Raises: NumadistError."""
    domains = machine.domains if variant.all_nodes else machine.domains[:1]
    cpus = [core.cpus[0] for domain in domains for core in domain.cores]
    nodes = sorted({n for domain in domains for n in machine.memory_of(domain.nodes)})
    numarun = []
    if options.nproc_per_socket:
        numarun = ["--nproc-per-socket", str(options.nproc_per_socket)]
    elif len(machine.domains) < 2:  # a machine with one node still shows what packing and fewer barriers give
        numarun = ["--nproc-per-node", "2"]
    # Without being asked for, the reference only checks the others' answers.
    is_timed = variant.name != REFERENCE or options.variants is None or REFERENCE in options.variants
    return Worker(variant.name, subject, cpus, nodes, numarun, is_timed, options.llama_python)


def _write(options: argparse.Namespace, cases: list[Case], machine: Machine) -> None:
    if options.json:
        report.write_json(
            options.json, report.to_json(cases, report.setting_of(options.dtype, len(machine.cores)))
        )
