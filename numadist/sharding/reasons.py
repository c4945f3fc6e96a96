"""What is not sharded as asked, in one warning."""

from numadist.log import get_logger
from numadist.sharding.schema import LeftAlone, Schema

log = get_logger(__name__)


def warn_left_alone(schema: Schema) -> None:
    """One warning for all layers that run replicated: what, and why."""
    if schema.left_alone and schema.num_ranks > 1:
        log.warning("these layers run replicated on every rank: %s", _with_reasons(schema.left_alone))


def warn_all_reduced(schema: Schema) -> None:
    """One warning for all sums that sequence parallelism leaves whole."""
    if schema.sequence is not None and schema.sequence.all_reduced:
        text = _with_reasons(schema.sequence.all_reduced)
        log.warning("sequence_parallel: sums of these modules are all-reduced as without it: %s", text)


def _with_reasons(entries: list[LeftAlone]) -> str:
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        reasons.setdefault(entry.reason, []).append(entry.module)
    return "; ".join(f"{_listed(modules)}: {reason}" for reason, modules in reasons.items())


def _listed(modules: list[str], limit: int = 3) -> str:
    shown = ", ".join(modules[:limit])
    return shown if len(modules) <= limit else f"{shown} and {len(modules) - limit} more"
