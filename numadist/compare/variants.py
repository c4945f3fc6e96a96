"""The ways to run one model that the harness compares, as data."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from numadist.errors import ConfigError, NumadistError


class CannotRun(NumadistError):
    """A variant does not take this model or dtype: it has no row, and that is no failure."""


@dataclass(frozen=True)
class Variant:
    """One way. `process`: where the model runs; `note`: what a reader of the table must know."""

    name: str
    process: str  # single | inprocess (one process, one pinned thread group per node) | ranks
    compile: str  # none | plain | freezing (weights packed once) | openvino | onnxruntime | llama.cpp
    policy: str = "local"  # memory policy of a single process: local | default | interleave | bind
    all_nodes: bool = True  # False: CPUs and memory of the first node only
    backend: str = "numa"
    reduce: bool = True  # False: wrong results on purpose, a bound for what communication can cost
    packages: tuple[str, ...] = ()  # that must be installed for it, by the names they are imported by
    install: str = ""  # what to ask pip for
    own_python: bool = False  # they may be in another interpreter: --llama-python
    auto: bool = False  # ranks and blocks as the cost model says; needs `numadist profile`
    sequence: bool = False  # sequence parallelism between blocks
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
        Variant("ranks-sequence", "ranks", "freezing", sequence=True, note="own tokens only between blocks"),
        Variant("ranks-gloo", "ranks", "freezing", backend="gloo", note="numarun, torch's Gloo"),
        Variant(
            *("openvino", "single", "openvino", "default"),
            packages=("openvino",),
            install="openvino",
            note="OpenVINO, one process",
        ),
        Variant(
            *("onnxruntime", "single", "onnxruntime", "default"),
            packages=("onnxruntime", "onnx", "onnxscript"),
            install="onnxruntime onnx onnxscript",
            note="ONNX Runtime, one process",
        ),
        Variant(
            *("llama.cpp", "single", "llama.cpp", "default"),
            packages=("llama_cpp",),
            install="llama-cpp-python",
            own_python=True,
            note="llama.cpp, one process",
        ),
        Variant("ranks-noreduce", "ranks", "freezing", reduce=False, note="WRONG results: a bound"),
    )
}
BASELINE = "compile"
AUTO = "ranks-auto"
REFERENCE = "eager"  # its answers are the ones the others are checked against


def missing(llama_python: str = sys.executable) -> dict[str, str]:
    """Variants whose packages are not installed: {name: what to do}."""
    found = {}
    for name, variant in VARIANTS.items():
        python = llama_python if variant.own_python else sys.executable
        if not all(_has(python, package) for package in variant.packages):
            found[name] = f"pip install {variant.install}"
            if variant.own_python:
                found[name] += f" for {python}, or name another interpreter by --llama-python"
    return found


def chosen(names: list[str] | None, absent: Mapping[str, str]) -> list[Variant]:
    """The named variants with baseline and reference, in the table's order; unnamed, all that need nothing more.

    absent: what `missing` says. Raises: ConfigError for a variant that is unknown or not installed.
    """
    on_request = {name for name, variant in VARIANTS.items() if variant.auto or variant.sequence}
    defaults = [name for name in VARIANTS if name not in on_request and name not in absent]
    wanted = {BASELINE, REFERENCE, *(names or defaults)}
    unknown = wanted - set(VARIANTS)
    if unknown:
        raise ConfigError(f"unknown variant {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    for name in wanted & set(absent):
        raise ConfigError(f"variant {name} needs a package: {absent[name]}")
    return [v for name, v in VARIANTS.items() if name in wanted]


def _has(python: str, package: str) -> bool:
    """Raises: ConfigError if there is no such interpreter."""
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError as error:
        raise ConfigError(f"cannot run the interpreter {python}: {error.strerror}") from None
