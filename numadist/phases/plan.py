"""Plans: which CPUs each rank has and how many threads it runs, for reading prompts and for decoding.

A rank's CPUs stand in thread order, the first core of every cache domain first, so that a plan of n threads is the
first n CPUs and changing the phase changes one number. Loads no torch: numarun reads plans too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numadist.errors import PlanError
from numadist.topology.cpuset import format_list

VERSION = 1


@dataclass(frozen=True)
class RankPlan:
    """One rank in one phase: its CPUs in thread order, and how many of the first run threads."""

    cpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class PhasePlan:
    """All ranks of a machine in one phase."""

    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True)
class PlanPair:
    """The plans of both phases, which differ in thread counts only: weights and keys stay where they are.

    topology_key: of the tree of CPUs the plan was made for; "" fits any. measured, rejected: what the choice rests on.
    Raises: PlanError for plans that do not go together.
    """

    prefill: PhasePlan
    decode: PhasePlan
    topology_key: str = ""
    model: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    rejected: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.prefill.ranks or len(self.prefill.ranks) != len(self.decode.ranks):
            raise PlanError(
                f"a plan needs the same ranks in both phases, got {len(self.prefill.ranks)} for prefill and "
                f"{len(self.decode.ranks)} for decode"
            )
        owner: dict[int, int] = {}
        for rank, (prefill, decode) in enumerate(zip(self.prefill.ranks, self.decode.ranks, strict=True)):
            if prefill.cpus != decode.cpus:
                raise PlanError(
                    f"rank {rank} has CPUs {list(prefill.cpus)} for prefill and {list(decode.cpus)} for decode; "
                    "phases differ in threads only"
                )
            for name, part in (("prefill", prefill), ("decode", decode)):
                if not 1 <= part.threads <= len(part.cpus):
                    raise PlanError(
                        f"rank {rank}, {name}: {part.threads} threads on {len(part.cpus)} CPUs; from 1 to one a CPU"
                    )
            for cpu in prefill.cpus:
                if owner.setdefault(cpu, rank) != rank or prefill.cpus.count(cpu) > 1:
                    raise PlanError(f"CPU {cpu} is given twice, to ranks {owner[cpu]} and {rank}")

    def rank_of(self, cpus: Sequence[int]) -> int:
        """The rank that has exactly these CPUs. Raises: PlanError."""
        for rank, part in enumerate(self.prefill.ranks):
            if set(part.cpus) == set(cpus):
                return rank
        have = " | ".join(format_list(part.cpus) for part in self.prefill.ranks)
        raise PlanError(
            f"this process runs on CPUs {format_list(cpus)}, the plan's ranks have {have}; start it by "
            "numarun --plan with the same file"
        )

    def to_dict(self) -> dict[str, Any]:
        """plan.json as plain data."""

        def of(plan: PhasePlan) -> dict[str, Any]:
            return {"ranks": [{"cpus": list(r.cpus), "threads": r.threads} for r in plan.ranks]}

        return {
            "version": VERSION,
            "topology_key": self.topology_key,
            "model": self.model,
            "prefill": of(self.prefill),
            "decode": of(self.decode),
            "measured": self.measured,
            "rejected": list(self.rejected),
        }

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")


def load_plan(path: str | Path) -> PlanPair:
    """The plans of a file. Raises: PlanError that says what is wrong with it."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise PlanError(f"cannot read plan {path}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"plan {path} is not JSON: {error}") from None
    try:
        return plan_of(data)
    except PlanError as error:
        raise PlanError(f"plan {path}: {error}") from None


def plan_of(data: Any) -> PlanPair:
    """PlanPair of plain data as to_dict gives it. Raises: PlanError."""
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise PlanError(
            f"version is {version!r}, this numadist reads version {VERSION}; run numadist tune again"
        )
    unknown = set(data) - {*PlanPair.__dataclass_fields__, "version"}
    if unknown:
        raise PlanError(f"unknown fields {sorted(unknown)}")
    for name, kind in (("topology_key", str), ("model", str), ("measured", dict), ("rejected", list)):
        if not isinstance(data.get(name, kind()), kind):
            raise PlanError(f"{name} must be of type {kind.__name__}, got {data[name]!r}")
    return PlanPair(
        _plan(data, "prefill"),
        _plan(data, "decode"),
        data.get("topology_key", ""),
        data.get("model", ""),
        data.get("measured", {}),
        tuple(data.get("rejected", ())),
    )


def _plan(data: dict[str, Any], phase: str) -> PhasePlan:
    ranks = data[phase].get("ranks") if isinstance(data.get(phase), dict) else None
    if not isinstance(ranks, list):
        raise PlanError(f"{phase} must be an object with a list `ranks`, got {data.get(phase)!r}")
    return PhasePlan(tuple(_rank(f"{phase}.ranks[{i}]", rank) for i, rank in enumerate(ranks)))


def _rank(where: str, data: Any) -> RankPlan:
    cpus, threads = (data.get("cpus"), data.get("threads")) if isinstance(data, dict) else (None, None)
    if not isinstance(cpus, list) or not all(type(n) is int and n >= 0 for n in [*cpus, threads]):
        raise PlanError(f"{where} must be {{cpus: [numbers], threads: number}}, got {data!r}")
    return RankPlan(tuple(cpus), int(threads or 0))
