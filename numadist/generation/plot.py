"""The sweep of `numadist bench serve` as a picture: a line a policy over the rate of arrivals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numadist.errors import GenerateError


@dataclass(frozen=True)
class Panel:
    """label: of its axis. styles: figure of a row -> line style. target: the one to mark. log: its axis is so."""

    label: str
    styles: Mapping[str, str]
    target: str = ""
    log: bool = False


PANELS = (
    Panel("goodput, requests/s", {"request_goodput": "-"}),
    # A queue that grows lifts it by orders of magnitude.
    Panel(
        "time to first token, ms (p99 dashed)",
        {"p50_ttft_ms": "-", "p99_ttft_ms": "--"},
        "ttft_ms",
        log=True,
    ),
    Panel("time per output token, ms (p99 dashed)", {"p50_tpot_ms": "-", "p99_tpot_ms": "--"}, "tpot_ms"),
)


def plot(path: str, rows: Sequence[Mapping[str, Any]], targets: Mapping[str, float], title: str) -> None:
    """rows: of the sweep, as its JSON has them. Raises: GenerateError without matplotlib."""
    pyplot = load_pyplot()
    figure = draw(rows, targets, title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def load_pyplot() -> Any:
    """Raises: GenerateError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise GenerateError("--plot needs the extra: pip install 'numadist[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(rows: Sequence[Mapping[str, Any]], targets: Mapping[str, float], title: str) -> Any:
    """The figure, a panel after the other."""
    figure, axes = load_pyplot().subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 4.0))
    for axis, panel in zip(axes, PANELS, strict=True):
        _draw_panel(axis, panel, rows)
        if panel.target:
            axis.axhline(targets[panel.target], color="gray", linewidth=0.8, linestyle=":", label="target")
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return figure


def _draw_panel(axis: Any, panel: Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        mine = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["rate"])
        for key, style in panel.styles.items():
            name = policy if style == "-" else "_"  # the legend names a policy once
            rates, values = [row["rate"] for row in mine], [row[key] for row in mine]
            axis.plot(rates, values, style, color=f"C{number}", marker=".", label=name)
    axis.set_xlabel("arrivals, requests/s")
    axis.set_ylabel(panel.label)
    if panel.log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
