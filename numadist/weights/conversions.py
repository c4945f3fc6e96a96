"""Checkpoints whose tensors have other names or lie in other pieces than the model's parameters.

transformers 5 keeps the experts of a mixture as one parameter, while files have a tensor an expert and projection. Its
own table says what becomes of what; renamings and stacking are read from it, any other conversion is left out, so that
its parameter is reported as missing.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Renaming:
    source: re.Pattern[str]
    target: str


@dataclass(frozen=True)
class Stacking:
    """Tensors x.0.a, x.0.b, x.1.a, ... become one: numbers along a new dim 0, sources joined along dim 1."""

    sources: tuple[re.Pattern[str], ...]  # each with one group: the number
    target: str


Conversion = Renaming | Stacking


def conversions_of(model: torch.nn.Module) -> list[Conversion]:
    """What transformers knows of the model's checkpoints; nothing for other models."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # no transformers, or one that keeps parameters as its files do
        return []
    kind = getattr(getattr(model, "config", None), "model_type", None)
    table: Any = get_checkpoint_conversion_mapping
    found = [_conversion(entry) for entry in table(kind) or []]
    return [entry for entry in found if entry is not None]


def _conversion(entry: Any) -> Conversion | None:
    operations = [type(op).__name__ for op in getattr(entry, "operations", None) or []]
    sources, targets = entry.source_patterns, entry.target_patterns
    if len(targets) != 1:
        return None
    if type(entry).__name__ == "WeightRenaming" and len(sources) == 1:
        return Renaming(re.compile(sources[0]), targets[0])
    joins = ["MergeModulelist", "Concatenate"] if len(sources) > 1 else ["MergeModulelist"]
    if operations != joins or any(op.dim != dim for dim, op in enumerate(entry.operations)):
        return None
    return Stacking(tuple(re.compile(_numbered(s)) for s in sources), targets[0])


def _numbered(pattern: str) -> str:
    """A name's end with `*` for a number, as an expression."""
    return re.escape(pattern).replace(r"\*", r"(\d+)") + "$"


def renamed(name: str, conversions: Iterable[Conversion]) -> str:
    for entry in conversions:
        if isinstance(entry, Renaming):
            name = entry.source.sub(entry.target, name)
    return name


def stacks(names: Iterable[str], conversions: Iterable[Conversion]) -> Mapping[str, list[list[str]]]:
    """{stacked name: names[number][source]}, where every number has all its sources."""
    names = list(names)
    whole: dict[str, list[list[str]]] = {}
    for entry in conversions:
        if not isinstance(entry, Stacking):
            continue
        found: dict[str, dict[tuple[int, int], str]] = {}
        for name in names:
            for i, source in enumerate(entry.sources):
                if match := source.search(name):
                    found.setdefault(name[: match.start()] + entry.target, {})[int(match[1]), i] = name
        for target, parts in found.items():
            count = 1 + max(number for number, _ in parts)
            if len(parts) == count * len(entry.sources):
                whole[target] = [[parts[n, i] for i in range(len(entry.sources))] for n in range(count)]
    return whole
