"""The ways to run one model that the harness compares, as data."""

from dataclasses import dataclass

from numadist.errors import ConfigError


@dataclass(frozen=True)
class Variant:
    """One way. `process`: where the model runs; `note`: what a reader of the table must know."""

    name: str
    process: str  # single | inprocess (one process, one pinned thread group per node) | ranks
    compile: str  # none | plain | freezing (weights packed once)
    policy: str = "local"  # memory policy of a single process: local | default | interleave | bind
    all_nodes: bool = True  # False: CPUs and memory of the first node only
    backend: str = "numa"
    reduce: bool = True  # False: wrong results on purpose, a bound for what communication can cost
    note: str = ""


VARIANTS = {
    v.name: v
    for v in (
        Variant("eager", "single", "none", "default"),
        Variant("compile-plain", "single", "plain", "default"),
        Variant("compile", "single", "freezing", "default", note="baseline"),
        Variant("compile+interleave", "single", "freezing", "interleave", note="numactl --interleave=all"),
        Variant("compile+localalloc", "single", "freezing", "local", note="numactl --localalloc"),
        Variant(
            "compile+single-node",
            "single",
            "freezing",
            "bind",
            all_nodes=False,
            note="one node's CPUs, memory",
        ),
        Variant("inprocess", "inprocess", "freezing", "default", note="one process, a thread group per node"),
        Variant("ranks", "ranks", "freezing", note="numarun, shared memory"),
        Variant("ranks-gloo", "ranks", "freezing", backend="gloo", note="numarun, torch's Gloo"),
        Variant("ranks-noreduce", "ranks", "freezing", reduce=False, note="WRONG results: a bound"),
    )
}
BASELINE = "compile"
REFERENCE = "eager"  # its answers are the ones the others are checked against


def chosen(names: list[str] | None) -> list[Variant]:
    """The named variants with baseline and reference, in the table's order. Raises: ConfigError."""
    wanted = {BASELINE, REFERENCE, *(names or VARIANTS)}
    unknown = wanted - set(VARIANTS)
    if unknown:
        raise ConfigError(f"unknown variant {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    return [v for name, v in VARIANTS.items() if name in wanted]
