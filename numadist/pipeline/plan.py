"""`numadist.plan`: the decisions for a model, before any weight is copied."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from numadist.costmodel.measure import kept_profile
from numadist.costmodel.profile import MachineProfile
from numadist.errors import NumadistError, ShardError
from numadist.graph.capture import CapturedModel
from numadist.graph.query import set_tensor
from numadist.pipeline.active_ranks import Member, check_count, members, possible_counts
from numadist.pipeline.quantize import Quantization, check_quantization, planned_codes
from numadist.pipeline.stages import capture, checkpoint_of, weights_file
from numadist.sharding.auto import choose_schema, divisors
from numadist.sharding.build_schema import build_schema
from numadist.sharding.reasons import warn_all_reduced, warn_left_alone
from numadist.sharding.schema import CodedWeights, Schema
from numadist.sharding.sequence import plan_sequence


def plan(
    model: torch.nn.Module,
    example_inputs: Any,
    num_ranks: int | None = None,
    *,
    ranks: int | Literal["auto"] | None = None,
    blocks: Literal["auto"] | None = None,
    profile: MachineProfile | None = None,
    sequence_parallel: bool = False,
    dynamic_shapes: Any = None,
    weights: str | Path | None = None,
    quantization: Quantization | None = None,
    group: dist.ProcessGroup | None = None,
) -> Schema:
    """Decide how `model` is split, for `numadist.shard(..., schema=)`, `numadist.explain` or a file.

    example_inputs, dynamic_shapes: as numadist.shard takes them.
    num_ranks: of the group the model will run on. Left out: those of `group`, by default of the whole job, and every
        rank must make the call alike; without a job 2, or one a node of `profile`, at least 2.
    ranks: how many of them compute, default all; "auto": as the cost model says. Each has the cores of several then,
        and the others only receive the result.
    blocks: "auto" splits only blocks that pay by the cost model; default all that can be split. Costs and rejected
        candidates are in `schema.costs`.
    profile: of the machine, for "auto"; default what `numadist profile` has kept.
    sequence_parallel: between blocks each rank computes its own tokens; sums are reduce-scattered, and gathered again
        where a block needs all tokens (docs/sharding.md). For inference; costs do not know of it.
    weights, quantization: as numadist.shard will get them; costs and bytes are then those of codes.
    No weight is copied, and the schema keeps none.
    Raises: ShardError if the model cannot be captured, or so many ranks cannot be used.
    """
    for name, value in (("ranks", ranks), ("blocks", blocks)):
        if isinstance(value, str) and value != "auto":
            raise ShardError(f'{name}={value!r}: expected "auto"{" or a number" if name == "ranks" else ""}')
    captured = capture(model, example_inputs, dynamic_shapes)
    codes = codes_for(captured, model, weights, quantization)
    pg = group if group is not None or not dist.is_initialized() else dist.group.WORLD
    if num_ranks is not None or pg is None:
        schema = plan_captured(
            captured, num_ranks or default_ranks(profile), ranks, blocks, profile, [], codes
        )
    else:
        everybody = members(pg) if ranks is not None or blocks is not None else []
        if "auto" in (ranks, blocks):
            profile = shared_profile(profile, everybody, pg)
        schema = plan_captured(captured, dist.get_world_size(pg), ranks, blocks, profile, everybody, codes)
    if sequence_parallel:
        schema = replace(schema, sequence=plan_sequence(captured.gm, schema))
    if pg is None or dist.get_rank(pg) == 0:
        warn_left_alone(schema)
        warn_all_reduced(schema)
    return replace(schema, graph=_without_weights(captured.gm))


def codes_for(
    captured: CapturedModel,
    model: torch.nn.Module,
    weights: str | Path | None,
    quantization: Quantization | None,
) -> dict[str, CodedWeights]:
    """What parameters become that are not kept as plain numbers. Raises: ShardError for a file that does not fit."""
    check_quantization(quantization)
    if quantization is None:
        return {}
    file = weights_file(checkpoint_of(weights, model), captured)
    return planned_codes(captured.gm, file, quantization)


def default_ranks(profile: MachineProfile | None) -> int:
    """Ranks to plan for where nothing says how many."""
    return 2 if profile is None else max(2, profile.nodes)


def plan_captured(
    captured: CapturedModel,
    num_ranks: int,
    ranks: int | str | None,
    blocks: str | None,
    profile: MachineProfile | None,
    everybody: list[Member],
    codes: dict[str, CodedWeights],
) -> Schema:
    """The same for a captured model. everybody: the ranks of a job, if it is planned for one. codes: of codes_for."""
    counts = _counts(captured, num_ranks, ranks, everybody)
    if ranks == "auto" or blocks == "auto":
        schema = choose_schema(captured, counts, profile or kept_profile(), blocks == "auto", codes)
    else:
        schema = replace(build_schema(captured, counts[0]), codes=codes)
    return replace(schema, group_size=num_ranks)


def _counts(
    captured: CapturedModel, num_ranks: int, ranks: int | str | None, everybody: list[Member]
) -> list[int]:
    """Numbers of ranks to consider, the preferred one first. Raises: ShardError for one that is impossible."""
    if ranks is None:
        return [num_ranks]
    possible = possible_counts(everybody, captured.gm) if everybody else divisors(num_ranks)
    if ranks == "auto":
        return possible
    assert isinstance(ranks, int)
    check_count(ranks, num_ranks, possible)
    return [ranks]


def _without_weights(gm: GraphModule) -> GraphModule:
    """The graph, its tensors replaced by ones that have a shape and a dtype only; tied ones stay tied."""
    named = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    empty: dict[int, torch.Tensor] = {}
    for name, t in named:
        if id(t) not in empty:
            like = torch.empty(t.shape, dtype=t.dtype, device="meta")
            empty[id(t)] = torch.nn.Parameter(like, False) if isinstance(t, torch.nn.Parameter) else like
        set_tensor(gm, name, empty[id(t)])
    return gm


def shared_profile(
    given: MachineProfile | None, everybody: list[Member], group: dist.ProcessGroup
) -> MachineProfile:
    """Rank 0's profile, cut to the cores the ranks have, the same on every rank. Collective.

    Raises: ShardError on every rank if rank 0 has none.
    """
    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            box = [(given or kept_profile()).to_json()]
        except NumadistError as error:
            box = [error]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(box[0], NumadistError):
        raise ShardError(str(box[0]))
    profile = MachineProfile.from_json(box[0])
    cores = max(1, sum(m.threads for m in everybody) // profile.nodes)
    return replace(profile, cores_per_node=min(cores, profile.cores_per_node))
