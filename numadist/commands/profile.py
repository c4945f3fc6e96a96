"""`numadist profile`: how fast this machine's memory, cores and sums are, for the cost model. Takes about a minute."""

import argparse
import os
import sys
from collections.abc import Sequence

from numadist.costmodel.measure import cache_file, measure, save_atomically
from numadist.costmodel.profile import MachineProfile, Table
from numadist.costmodel.ranks import all_reduce_us
from numadist.errors import NumadistError
from numadist.topology.machine import Machine
from numadist.topology.sysfs import read_machine

MAX_FOREIGN_LOAD = 0.5  # load average per core, above which numbers are not worth keeping
# Ranks per NUMA node whose sums are measured; more than the cores of a node make no rank.
RANKS_PER_NODE = (1, 2, 4)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="numadist profile", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write it to FILE too")
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy, or again")
    options = parser.parse_args(argv)
    machine, path = read_machine(), cache_file()
    if path.exists() and not options.force:
        profile = MachineProfile.load(path)
        print(f"kept in {path}; --force measures again")
    else:
        _check_load(machine, options.force)
        profile = measure(_progress, _sums(machine))
        save_atomically(profile, path)
        print(f"kept in {path}")
    if options.json:
        profile.save(options.json)
    print("\n".join(lines(profile)))
    return 0


def _check_load(machine: Machine, force: bool) -> None:
    load, cores = os.getloadavg()[0], len(machine.cores)
    if load > MAX_FOREIGN_LOAD * cores and not force:
        raise NumadistError(
            f"the load average is {load:.1f} on {cores} cores: numbers measured now would be wrong; "
            "wait until the machine is idle, or use --force"
        )


def _sums(machine: Machine) -> dict[int, Table]:
    """{ranks: {bytes: microseconds}}."""
    sums = {}
    smallest = min(len(d.cores) for d in machine.domains)
    for per_node in RANKS_PER_NODE:
        ranks = per_node * len(machine.domains)
        if per_node <= smallest and ranks > 1:
            _progress(f"all_reduce over {ranks} ranks")
            sums[ranks] = all_reduce_us(["--nproc-per-node", str(ranks)])
    return sums or {2: {1: 0.0}}


def _progress(what: str) -> None:
    print(f"numadist profile: {what}", file=sys.stderr, flush=True)


def lines(profile: MachineProfile) -> list[str]:
    """The profile as a table, and where its numbers are from."""
    out = [f"{profile.name}: {profile.nodes} nodes of {profile.cores_per_node} cores"]
    for i, row in enumerate(profile.bandwidth_gbs):
        out.append(f"  node {i} reads from nodes, GB/s: {_row(row)}")
    out.append(f"  one core reads {profile.core_gbs:.1f} GB/s, from its cache {profile.cache_gbs:.1f}")
    for what, rates, unit in (
        ("linear", profile.gemm_gflops, "rows"),
        ("torch's attention", profile.attention_gflops, "keys"),
        ("our attention", profile.own_attention_gflops, "keys"),
    ):
        for kind, table in rates.items():
            cells = ", ".join(f"{size} {unit} {rate:.0f}" for size, rate in table.items())
            out.append(f"  {what} {kind}, GFLOP/s a core: {cells}")
    out.append("  speed-up on cores: " + ", ".join(f"{n}: {s:.2f}" for n, s in profile.speedup.items()))
    for ranks, table in profile.all_reduce_us.items():
        cells = ", ".join(f"{size} B {us:.1f}" for size, us in table.items())
        out.append(f"  all_reduce over {ranks} ranks, us: {cells}")
    out.append(f"  an empty parallel region {profile.region_us:.1f} us, an op {profile.op_us:.1f} us")
    by_source: dict[str, list[str]] = {}
    for field, source in profile.sources.items():
        by_source.setdefault(source, []).append(field)
    return [*out, *(f"  {', '.join(names)}: {source}" for source, names in by_source.items())]


def _row(values: Sequence[float]) -> str:
    return " ".join(f"{v:.1f}" for v in values)
