"""State of an optimizer over a sharded model, whole: saved on some ranks, it is loaded on another number of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numadist.errors import ShardError
from numadist.pipeline.sharded_model import ShardedModel
from numadist.pipeline.whole import gather_whole, part_of


def optimizer_state_dict(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State by the parameters' names in the unsharded model, tensors whole, and the options of its groups. Collective.

    Raises: ShardError for an optimizer over parameters that are not the model's, or one that mixes their elements.
    """
    names = _names(model, optimizer)
    state: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        entry: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            is_part = isinstance(value, Tensor) and value.dim() > 0
            if is_part and value.shape != parameter.shape:
                raise ShardError(
                    f"{type(optimizer).__name__} keeps {key} of shape {list(value.shape)} for {name} of shape "
                    f"{list(parameter.shape)}: only optimizers that treat each element alone can train a part"
                )
            entry[key] = (
                gather_whole(value, model.placement(name), model.rank, model.group) if is_part else value
            )
        state[name] = entry
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    members = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    return {"state": state, "groups": [{"names": n, **o} for n, o in zip(members, options, strict=True)]}


def load_optimizer_state_dict(
    model: ShardedModel, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Give an optimizer over the model's parameters what optimizer_state_dict has saved, on any number of ranks.

    Raises: ShardError for a parameter that the state lacks.
    """
    names = _names(model, optimizer)
    for parameter, name in names.items():
        if name not in state_dict["state"]:
            raise ShardError(f"the optimizer's state has nothing of {name}; it is of another model")
        entry = {}
        for key, value in state_dict["state"][name].items():
            is_part = isinstance(value, Tensor) and value.dim() > 0
            placed = model.placement(name)
            entry[key] = part_of(value, name, placed, model.rank, parameter.shape) if is_part else value
        optimizer.state[parameter] = entry
    for group, saved in zip(optimizer.param_groups, state_dict["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "names"})


def _names(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    names = {p: name for name, p in model.local.named_parameters()}
    known: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ShardError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's; "
                    "save what else it trains beside the sharded model"
                )
            known[parameter] = names[parameter]
    return known
