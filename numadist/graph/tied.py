"""Parameters that a model has by more than one name."""

import torch


def named_once(model: torch.nn.Module) -> list[tuple[list[str], torch.nn.Parameter]]:
    """Every parameter with all its names, in the order of the first."""
    found: dict[int, tuple[list[str], torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    return list(found.values())


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Of each name of a parameter that has several: the others."""
    several = (names for names, _ in named_once(model) if len(names) > 1)
    return {name: [other for other in names if other != name] for names in several for name in names}
