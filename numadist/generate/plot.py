"""The sweep of `numadist bench serve` as a picture: a line a policy over the rate of arrivals."""

from collections.abc import Mapping, Sequence
from typing import Any

from numadist.errors import GenerateError

# Panel: what its axis says, and the figures of a row that it shows with their line styles.
PANELS = (
    ("goodput, requests/s", {"request_goodput": "-"}),
    ("time to first token, ms (p99 dashed)", {"p50_ttft_ms": "-", "p99_ttft_ms": "--"}),
    ("time per output token, ms (p99 dashed)", {"p50_tpot_ms": "-", "p99_tpot_ms": "--"}),
)
_TARGETS = {1: "ttft_ms", 2: "tpot_ms"}  # panel -> the target it marks


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
    """The figure. Latencies are on a logarithmic axis: a queue that grows lifts them by orders of magnitude."""
    figure, axes = load_pyplot().subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 4.0))
    for i, (axis, (label, styles)) in enumerate(zip(axes, PANELS, strict=True)):
        for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
            mine = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["rate"])
            for key, style in styles.items():
                name = policy if style == "-" else "_"  # the legend names a policy once
                x, y = [row["rate"] for row in mine], [row[key] for row in mine]
                axis.plot(x, y, style, color=f"C{number}", marker=".", label=name)
        if i in _TARGETS:
            axis.set_yscale("log")
            axis.axhline(targets[_TARGETS[i]], color="gray", linewidth=0.8, linestyle=":", label="target")
        axis.set_xlabel("arrivals, requests/s")
        axis.set_ylabel(label)
        axis.legend(fontsize=8)
    axes[0].set_ylim(bottom=0)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return figure
