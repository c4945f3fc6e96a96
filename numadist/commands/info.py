"""`numadist info`: what a bug report needs, as plain text to paste."""

import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata

import numadist
from numadist import config
from numadist.binding import current_binding
from numadist.errors import NumadistError
from numadist.topology.cpuset import format_list
from numadist.topology.render import render
from numadist.topology.sysfs import read_machine

PACKAGES = ("torch", "numpy", "transformers")


def main(argv: Sequence[str]) -> int:
    """Print the report; what cannot be found is said in its place, never an error."""
    for name, value in report():
        print(f"{name + ':':<14}{value}" if "\n" not in value else f"{name}:\n{value}")
    return 0


def report() -> list[tuple[str, str]]:
    """(name, text) rows in the order they are printed."""
    rows = [
        ("numadist", numadist.__version__),
        ("native core", _or_reason(_native)),
        ("bf16, f16", _or_reason(_halves)),
        ("quantized", _or_reason(_codes)),
        ("python", f"{platform.python_version()} {platform.python_implementation()}"),
        (
            "system",
            f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        ),
    ]
    rows += [(name, _or_reason(partial(metadata.version, name))) for name in PACKAGES]
    return [
        *rows,
        ("variables", _variables()),
        ("this process", _binding()),
        ("machine", _or_reason(_machine)),
    ]


def _or_reason(find: Callable[[], str]) -> str:
    try:
        return find()
    except (NumadistError, metadata.PackageNotFoundError, ImportError, OSError) as error:
        return f"not available ({type(error).__name__}: {error})"


def _native() -> str:
    from numadist import _native

    limit = config.config().max_isa
    limited = f" (at most {limit}, by NUMADIST_MAX_ISA)" if limit else ""
    return f"instruction sets {', '.join(_native.supported_isas())}{limited}"


def _halves() -> str:
    """What multiplies by them in compiled models."""
    import torch

    from numadist.kernels import half

    return "; ".join(half.kernel_name(dtype) for dtype in (torch.bfloat16, torch.float16))


def _codes() -> str:
    """What multiplies by weights that stay codes."""
    from numadist.kernels import quantized

    return quantized.kernel_name()


def _variables() -> str:
    """The knobs that differ from their default."""
    values = config.config()
    found = [
        f"{name}={value}"
        for (name, _, default, _), value in zip(config.rows(), vars(values).values(), strict=True)
        if value != default
    ]
    return " ".join(found) or "all at their defaults"


def _binding() -> str:
    binding = current_binding()
    if binding.policy is None:
        return f"cpus {format_list(binding.cpus)}, memory policy unknown (get_mempolicy is refused)"
    nodes = f" {format_list(binding.mem_nodes)}" if binding.mem_nodes else ""
    return f"cpus {format_list(binding.cpus)}, memory policy {binding.policy}{nodes}"


def _machine() -> str:
    return render(read_machine())
