"""Every NUMADIST_* variable: one row a knob, and the only place that reads them.

Order of precedence everywhere: argument, then NUMADIST_*, then the default in this table.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from numadist.errors import ConfigError

PREFIX = "NUMADIST_"


def knob(name: str, default: Any, doc: str) -> Any:
    """One row of the table: environment name, default, one sentence for docs/env.md."""
    return field(default=default, metadata={"name": name, "doc": doc})


@dataclass(frozen=True)
class Config:
    """The values of all knobs; `config()` reads them once per process."""

    # Set by numarun for its ranks.
    job_id: str = knob("NUMADIST_JOB_ID", "", "Random id of the job; set by numarun.")
    nodes: str = knob("NUMADIST_NODES", "", "Memory nodes of this rank, e.g. `0` or `0,2`; set by numarun.")
    node_map: str = knob(
        "NUMADIST_NODE_MAP", "", "Memory nodes of this machine's ranks, e.g. `0|8`; set by numarun."
    )
    cpus: str = knob("NUMADIST_CPUS", "", "CPUs of this rank, e.g. `0-7`; set by numarun.")

    store: str = knob(
        "NUMADIST_STORE",
        "",
        "Port and file, `29400:/tmp/...`: ranks that would meet at the port meet in the file; "
        "set by numarun on one machine.",
    )

    plan: str = knob(
        "NUMADIST_PLAN", "", "plan.json with the thread counts of both phases; set by `numarun --plan`."
    )

    machine: str = knob(
        "NUMADIST_MACHINE",
        "",
        "Ranks with different words here share no memory; numarun sets it when there are several machines.",
    )

    backend: str = knob(
        "NUMADIST_BACKEND", "", "`numa`: scripts that ask for gloo, or for no backend, get numa."
    )

    # Collectives.
    spin_us: int = knob("NUMADIST_SPIN_US", 50, "Spin so long for a peer, then yield, then sleep on a futex.")
    one_shot_bytes: int = knob(
        "NUMADIST_ONE_SHOT_BYTES", -1, "Largest one-step all_reduce of 3 and more ranks; -1: from a table."
    )

    # What one start leaves to the next.
    cache_dir: str = knob(
        "NUMADIST_CACHE_DIR",
        "$XDG_CACHE_HOME/numadist",
        "Folder of captured graphs and compiled code, for the next start and the other ranks; without XDG_CACHE_HOME "
        "it lies in `~/.cache`. Empty: nothing is kept.",
    )

    progress: str = knob(
        "NUMADIST_PROGRESS",
        "",
        "Where a start says what it is at: `lines` on standard error, or a terminal's name; empty: nowhere. "
        "numarun sets it for rank 0, unless `--quiet`; from `auto` it makes its own terminal, or lines.",
    )

    # Diagnosis.
    trace: str = knob(
        "NUMADIST_TRACE",
        "",
        "At its end every process writes FILE.rRANK.PID.json and .txt: its collectives by group, operation and size.",
    )
    max_isa: str = knob(
        "NUMADIST_MAX_ISA",
        "",
        "Best instruction set our kernels use: `portable`, `avx2`, `avx512`, `avx512_vnni`, `avx512_bf16` or "
        "`amx_bf16`, on Arm `portable` or `neon_dotprod`; torch's own follow `ATEN_CPU_CAPABILITY` and "
        "`ONEDNN_MAX_CPU_ISA`.",
    )
    sysfs: str = knob("NUMADIST_SYSFS", "", "Default of `numarun --sysfs`: a recorded machine to plan for.")


def cache_folder() -> Path | None:
    """Where captured graphs and compiled code are kept; None if they are not."""
    where = config().cache_dir
    if not where:
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(where.replace("$XDG_CACHE_HOME", base)).expanduser().absolute()


def rows() -> list[tuple[str, str, Any, str]]:
    """(environment name, type name, default, sentence) of every knob, in table order."""
    return [(f.metadata["name"], f.type.__name__, f.default, f.metadata["doc"]) for f in fields(Config)]  # type: ignore[union-attr]


def to_markdown() -> str:
    """The table as docs/env.md shows it."""

    def escaped(text: str) -> str:
        return text.replace("|", "\\|")

    lines = [
        "# Environment variables",
        "",
        "Generated from `numadist/config.py`; a test keeps them equal.",
        "",
    ]
    lines += ["| variable | type | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {kind} | `{default!r}` | {escaped(doc)} |" for name, kind, default, doc in rows()
    ]
    return "\n".join(lines) + "\n"


def load(environ: Mapping[str, str]) -> Config:
    """Config from an environment. Raises: ConfigError for an unknown name or a value of the wrong type."""
    known = {f.metadata["name"]: f for f in fields(Config)}
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            import difflib  # late: numarun reads the table at every start

            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown variable {name}; did you mean {near}? All names: docs/env.md")
        row = known[name]
        try:
            values[row.name] = row.type(text)  # type: ignore[operator]
        except ValueError:
            raise ConfigError(f"{name} must be {row.type.__name__}, got {text!r}") from None  # type: ignore[union-attr]
    return Config(**values)


_config: Config | None = None


def config() -> Config:
    """The process's configuration, read from the environment on first use."""
    global _config
    if _config is None:
        _config = load(os.environ)
    return _config
