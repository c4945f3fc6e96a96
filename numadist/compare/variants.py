"""The ways to run one model that the harness compares, as data."""

import importlib.util
from dataclasses import dataclass

from numadist.errors import ConfigError


@dataclass(frozen=True)
class Variant:
    """One way. `process`: where the model runs; `note`: what a reader of the table must know."""

    name: str
    process: str  # single | inprocess (one process, one pinned thread group per node) | ranks
    compile: str  # none | plain | freezing (weights packed once) | openvino
    policy: str = "local"  # memory policy of a single process: local | default | interleave | bind
    all_nodes: bool = True  # False: CPUs and memory of the first node only
    backend: str = "numa"
    reduce: bool = True  # False: wrong results on purpose, a bound for what communication can cost
    package: str = ""  # that must be installed for it
    auto: bool = False  # ranks and blocks as the cost model says; needs `numadist profile`
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
        Variant("ranks-auto", "ranks", "freezing", auto=True, note="ranks and blocks by the cost model"),
        Variant("ranks-gloo", "ranks", "freezing", backend="gloo", note="numarun, torch's Gloo"),
        Variant(
            "openvino", "single", "openvino", "default", package="openvino", note="OpenVINO, one process"
        ),
        Variant("ranks-noreduce", "ranks", "freezing", reduce=False, note="WRONG results: a bound"),
    )
}
BASELINE = "compile"
AUTO = "ranks-auto"
REFERENCE = "eager"  # its answers are the ones the others are checked against


def chosen(names: list[str] | None) -> list[Variant]:
    """The named variants with baseline and reference, in the table's order; unnamed, all that need nothing more.

    Raises: ConfigError for one that is unknown or not installed.
    """
    wanted = {BASELINE, REFERENCE, *(names or filter(_is_default, VARIANTS))}
    unknown = wanted - set(VARIANTS)
    if unknown:
        raise ConfigError(f"unknown variant {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    for name in wanted:
        if not _is_installed(name):
            raise ConfigError(f"variant {name} needs a package: pip install {VARIANTS[name].package}")
    return [v for name, v in VARIANTS.items() if name in wanted]


def _is_default(name: str) -> bool:
    return _is_installed(name) and not VARIANTS[name].auto


def _is_installed(name: str) -> bool:
    package = VARIANTS[name].package
    return not package or importlib.util.find_spec(package) is not None
