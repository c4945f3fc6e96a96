"""The harness's tables, JSON and heat maps."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from numadist.compare.rounds import Case, Row
from numadist.compare.statistics import Ratio, geometric_mean, ratio
from numadist.compare.variants import AUTO, BASELINE, VARIANTS
from numadist.errors import NumadistError

FOREIGN_LIMIT = 0.2  # cores kept busy by others, above which a case is marked


def ratio_of(case: Case, row: Row) -> Ratio | None:
    """Speed-up over the baseline; None if the baseline has no row."""
    found = [r for r in case.rows if r.variant == BASELINE]
    return ratio(found[0].timing, row.timing) if found else None


def case_lines(case: Case) -> list[str]:
    """One table: a line a variant."""
    lines = [f"{case.model}, batch {case.batch}, sequence {case.seq}"]
    if case.skipped:
        return [*lines, f"  skipped: {case.skipped}"]
    header = f"  {'variant':<21}{'median':>9}{'min':>9}{'CV':>7}  {'speed-up [95 %]':<20}{'':<8}error"
    lines.append(header)
    for row in case.rows:
        speed = ratio_of(case, row)
        text = f"{speed.median:.2f} [{speed.low:.2f}-{speed.high:.2f}]" if speed else "-"
        verdict = "" if speed is None or row.variant == BASELINE else speed.verdict
        notes = [VARIANTS[row.variant].note] if VARIANTS[row.variant].note else []
        if row.all_reduce_ms:
            notes.append(
                f"all-reduce: waiting {row.wait_ms:.1f} ms, moving data {row.all_reduce_ms - row.wait_ms:.1f} ms"
            )
        lines.append(
            f"  {row.variant:<21}{row.timing.median_ms:>6.1f} ms{row.timing.min_ms:>6.1f} ms"
            f"{row.timing.cv:>7.1%}  {text:<20}{verdict:<8}{row.error:.0e}  {'; '.join(notes)}"
        )
    lines += [f"  {name:<21}no row: {why}" for name, why in case.left_out.items()]
    lines += [f"  {name:<21}no result: {why}" for name, why in case.failed.items()]
    if case.foreign_cores > FOREIGN_LIMIT or case.steal > 0.01:
        lines.append(f"  noisy: {case.foreign_cores:.1f} cores busy with other work, {case.steal:.1%} stolen")
    if case.repeated:
        lines.append(f"  {case.repeated} rounds taken again because of other work")
    return lines


def summary_lines(cases: list[Case]) -> list[str]:
    """Over all shapes: geometric mean, worst case, and how often a variant is slower than the baseline."""
    timed = [case for case in cases if case.rows]
    lines = [f"over {len(timed)} shapes, against {BASELINE}:"]
    for name in VARIANTS:
        speeds = [s for c in cases for r in c.rows if r.variant == name and (s := ratio_of(c, r)) is not None]
        if name == BASELINE or not speeds:
            continue
        medians = [s.median for s in speeds]
        slower = sum(s.verdict == "slower" for s in speeds)
        lines.append(
            f"  {name:<21}geometric mean {geometric_mean(medians):.2f}, worst {min(medians):.2f}, "
            f"slower in {slower} of {len(speeds)}"
        )
    return lines + auto_lines(timed)


def auto_lines(cases: list[Case]) -> list[str]:
    """How far the plan that the cost model chose is from the best of what it chose between."""
    found = []
    for case in cases:
        timings = {row.variant: row.timing for row in case.rows}
        if timings.keys() >= {AUTO, BASELINE, "ranks"}:
            best = min((BASELINE, "ranks"), key=lambda name: timings[name].median_ms)
            found.append((ratio(timings[best], timings[AUTO]), best, case))
    if not found:
        return []
    speed, best, case = min(found, key=lambda f: f[0].median)
    return [
        f"  {AUTO} against the best of {BASELINE} and ranks: worst {speed.median:.2f} "
        f"[{speed.low:.2f}-{speed.high:.2f}], against {best} on {case.model} at {case.batch} x {case.seq}"
    ]


def to_json(cases: list[Case], setting: dict[str, Any]) -> list[dict[str, Any]]:
    """One object per shape and variant, all round medians included."""
    rows = []
    for case in cases:
        shape = {"model": case.model, "batch": case.batch, "seq": case.seq, **setting}
        if case.skipped:
            rows.append({**shape, "skipped": case.skipped})
        for row in case.rows:
            speed = ratio_of(case, row)
            rows.append(
                {
                    **shape,
                    "variant": row.variant,
                    "rounds_ms": row.timing.rounds_ms,
                    "median_ms": row.timing.median_ms,
                    "min_ms": row.timing.min_ms,
                    "mean_ms": row.timing.mean_ms,
                    "cv": row.timing.cv,
                    "speed_up": speed.median if speed else None,
                    "speed_up_interval": [speed.low, speed.high] if speed else None,
                    "verdict": speed.verdict if speed else None,
                    "error": row.error,
                    "first_s": row.first_s,
                    "all_reduce_ms": row.all_reduce_ms,
                    "wait_ms": row.wait_ms,
                    "foreign_cores": case.foreign_cores,
                    "steal": case.steal,
                    "repeated_rounds": case.repeated,
                }
            )
        for key, reasons in (("left_out", case.left_out), ("failed", case.failed)):
            rows += [{**shape, "variant": name, key: why} for name, why in reasons.items()]
    return rows


def setting_of(dtype: str, num_cpus: int) -> dict[str, Any]:
    """What every JSON row repeats, so that rows of different runs can be told apart."""
    return {
        "dtype": dtype,
        "num_cpus": num_cpus,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
    }


def write_json(path: str, rows: list[dict[str, Any]]) -> None:
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def plot(path: str, cases: list[Case], title: str) -> None:
    """Heat maps, batch by sequence, a row a model and a column a variant: the table's speed-ups as colours.

    Raises: NumadistError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise NumadistError("--plot needs the extra: pip install 'numadist[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(case.model for case in cases))
    names = [n for n in VARIANTS if n != BASELINE and any(r.variant == n for c in cases for r in c.rows)]
    size = (3.2 * len(names), 2.6 * len(models) + 0.4)
    figure, axes = pyplot.subplots(len(models), len(names), figsize=size, squeeze=False)
    for line, model in zip(axes, models, strict=True):
        for axis, name in zip(line, names, strict=True):
            _heat_map(axis, [case for case in cases if case.model == model], name)
            axis.set_title(f"{model}: {name}", fontsize=9)
    figure.suptitle(f"{title}: speed-up over {BASELINE}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _heat_map(axis: Any, cases: list[Case], name: str) -> None:
    batches, seqs = sorted({c.batch for c in cases}), sorted({c.seq for c in cases})
    grid = torch.full((len(batches), len(seqs)), float("nan"))
    for case in cases:
        for row in case.rows:
            speed = ratio_of(case, row) if row.variant == name else None
            if speed is not None:
                grid[batches.index(case.batch), seqs.index(case.seq)] = speed.median
    axis.imshow(grid.numpy(), cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto")
    for i in range(len(batches)):
        for j in range(len(seqs)):
            if not torch.isnan(grid[i, j]):
                axis.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center")
    axis.set_xticks(range(len(seqs)), seqs)
    axis.set_yticks(range(len(batches)), batches)
    axis.set_xlabel("sequence")
    axis.set_ylabel("batch")
