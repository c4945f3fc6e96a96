"""How far is the simulator from every published figure? Writes the table of docs/simulator.md.

python benchmarks/simulator_validation.py          prints the table
python benchmarks/simulator_validation.py --write  writes it into docs/simulator.md
python benchmarks/simulator_validation.py --fit    chooses the constants of numa-torch anew from the fitted figures
"""

import argparse
import math
import random
from dataclasses import replace
from pathlib import Path

from numadist.costmodel.software import NUMA_TORCH, Software
from numadist.simulate.published import (
    FIGURES,
    Predictions,
    Result,
    settings,
    share_of_right_signs,
    validate,
    worst_mean_error,
)

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "simulator.md"
BEGIN, END = "<!-- table: made by benchmarks/simulator_validation.py --write -->", "<!-- end of table -->"
FITTED = ("bytes_per_flop", "score_bytes", "l2_exponent", "balancing", "one_node_slowdown", "sum_passes[4]")
STEPS = 400


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.fit:
        fit()
        return
    text = "\n".join(lines(validate()))
    print(text)
    if options.write:
        head, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def lines(results: list[Result]) -> list[str]:
    """The table, the constants and the two bars, as Markdown."""
    out = ["| figure | published | predicted | error | sign | use |", "|---|---|---|---|---|---|"]
    for r in results:
        number = ".0f" if r.figure.kind == "slower" else ".2f"
        sign = {True: "right", False: "wrong", None: "-"}[r.sign_is_right]
        use = "fitted" if r.figure.fitted else "held out" if r.figure.held_out else "in view"
        of = f" of {r.figure.of}" if r.figure.of else ""
        out.append(
            f"| {r.figure.name} | {r.figure.published:{number}}{of} | {r.predicted:{number}}{of} | {r.error:+.0%} "
            f"| {sign} | {use} |"
        )
    out += ["", "| fitted constant | value | pinned by |", "|---|---|---|"]
    out += [f"| {name} | {value:g} | {why} |" for name, (value, why) in settings().items()]
    right, worst = share_of_right_signs(results), worst_mean_error(results)
    return [
        *out,
        "",
        f"Held-out figures with the right sign: {right:.0%}. Largest error of a held-out geometric mean: {worst:.0%}.",
    ]


def fit() -> None:
    """Random steps in logarithms that shrink while they fail, from the constants as they stand."""
    draw = random.Random(0)
    best, best_loss, step = NUMA_TORCH, loss(NUMA_TORCH), 0.3
    for _ in range(STEPS):
        candidate = stepped(best, draw, step)
        if (found := loss(candidate)) < best_loss:
            best, best_loss, step = candidate, found, min(0.3, step * 1.3)
        else:
            step = max(0.005, step * 0.98)
    print(f"loss {best_loss:.5f}")
    for name in FITTED:
        print(f"{name:20}{value_of(best, name):.4g}")


def loss(software: Software) -> float:
    """Sum of squared logarithms of predicted over published, fitted figures only."""
    predictions = Predictions(software)
    return sum(math.log(f.predict(predictions) / f.published) ** 2 for f in FIGURES if f.fitted)


def stepped(software: Software, draw: random.Random, step: float) -> Software:
    changes: dict = {}
    for name in FITTED:
        if draw.random() < 0.5:
            value = value_of(software, name) * math.exp(draw.gauss(0, step))
            changes |= {"sum_passes": {2: 1.0, 4: value}} if name == "sum_passes[4]" else {name: value}
    return replace(software, **changes)


def value_of(software: Software, name: str) -> float:
    return software.sum_passes[4] if name == "sum_passes[4]" else getattr(software, name)


if __name__ == "__main__":
    main()
