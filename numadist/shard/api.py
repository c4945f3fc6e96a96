"""`numadist.shard`: an unmodified model in, this rank's part of it out."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from numadist.costmodel.profile import MachineProfile
from numadist.errors import ShardError
from numadist.log import get_logger
from numadist.memory.local import local_empty
from numadist.shard.apply import apply, check_fits
from numadist.shard.auto import choose_schema, shared_profile
from numadist.shard.blocks import build_schema
from numadist.shard.capture import as_args, capture
from numadist.shard.checkpoint import Checkpoint
from numadist.shard.compiled import compile_frozen
from numadist.shard.conversions import conversions_of
from numadist.shard.gguf import GgufCheckpoint
from numadist.shard.leaders import Member, check_count, lead, members, possible_counts, share_outputs
from numadist.shard.load import localize_parameters
from numadist.shard.reduce import Emitter, emit_functional, emit_numadist
from numadist.shard.schema import LeftAlone, Schema
from numadist.shard.sequence import plan_sequence
from numadist.shard.training import emit_trainable

log = get_logger(__name__)


class ShardedModel(torch.nn.Module):
    """One rank's part of a model; called as the original is, returns what the original returns on every rank.

    local_bytes: of the parameters this rank holds, tied names counted once.
    Non-tensor keyword inputs of the example (`use_cache=False`) are part of the graph and may be left out.
    """

    def __init__(self, local: GraphModule, schema: Schema, rank: int, constants: Mapping[str, Any]):
        super().__init__()
        self.local = local
        self.schema = schema
        self.rank = rank
        self._constants = dict(constants)
        self.local_bytes = sum(p.numel() * p.element_size() for p in local.parameters())
        self._compiled: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._compiled or self.local
        return run(*args, **{**self._constants, **kwargs})

    def compile_local(self, one_shape: bool = False) -> None:
        """Compile this rank's graph for inference; the first call then takes the time compilation takes.

        one_shape: the graph was captured for fixed sizes; see compile_frozen.
        """
        self._compiled = compile_frozen(self.local, one_shape=one_shape)


def shard(
    model: torch.nn.Module,
    example_inputs: Any,
    *,
    group: dist.ProcessGroup | None = None,
    schema: Schema | None = None,
    dynamic_shapes: Any = None,
    weights: str | Path | None = None,
    compile: bool = False,
    train: bool = False,
    ranks: int | str | None = None,
    blocks: str | None = None,
    profile: MachineProfile | None = None,
    sequence_parallel: bool = False,
) -> ShardedModel:
    """Split an unmodified model over the ranks of `group`; a collective call: every rank makes it alike.

    example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs, equal in shape on all ranks.
    dynamic_shapes: as torch.export.export takes it, for inputs whose sizes change between calls.
    weights: a .safetensors file or a folder of them, or a .gguf file, for a model made under
        `numadist.empty_parameters()`: only this rank's slices are read, into memory of its node.
    compile: torch.compile this rank's graph for inference, weights packed once ("freezing"; compiled.py).
    train: give the collectives their backward and the parameters gradients. Dropout in training mode is not sharded.
    schema: decisions to use instead of planning, e.g. an edited `Schema.load(path)`.
    ranks: how many of the group's ranks to use, default all; "auto": as the cost model says. Ranks that are left out
        give their CPUs to one that is not and only receive the result.
    blocks: "auto" shards only blocks that pay by the cost model. Costs and rejected plans are in `schema.costs`.
    profile: of this machine, default what `numadist profile` has kept.
    sequence_parallel: between blocks each rank computes its own tokens; sums are reduce-scattered, and gathered again
        where a block needs all tokens (docs/sharding.md). For inference. A schema that has it needs no argument.
    Keeps no reference to the full weights; drop yours to free them.
    Raises: ShardError if the model cannot be captured, no group exists, or the schema does not fit.
    """
    _check_call(ranks, blocks, compile, train, sequence_parallel)
    pg = group if group is not None else dist.group.WORLD
    rank, num_ranks = dist.get_rank(pg), dist.get_world_size(pg)
    args, kwargs = as_args(example_inputs)
    begin = time.monotonic()
    gm = capture(model, args, kwargs, dynamic_shapes)
    everybody = members(pg) if ranks is not None or blocks is not None else []
    if schema is None:
        schema = _planned(gm, everybody, pg, ranks, blocks, profile)
    check_fits(gm, schema, schema.num_ranks if ranks == "auto" else ranks or num_ranks)
    if sequence_parallel and schema.sequence is None:
        schema = with_sequence(gm, schema, warn=rank == 0)
    check_alike(schema, pg)
    planned = time.monotonic()
    log.info("planned %s for %d ranks in %.1f s", type(model).__name__, schema.num_ranks, planned - begin)
    if everybody:
        rank = _apply_to_leaders(gm, schema, everybody, pg)
    else:
        apply(gm, schema, rank, emit_trainable(pg.group_name, rank, num_ranks) if train else emitter_of(pg))
    localize_parameters(gm, schema, rank, local_empty, open_checkpoint(weights, model), train)
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    sharded = ShardedModel(gm, schema, rank, constants)
    if compile:
        sharded.compile_local(one_shape=dynamic_shapes is None)
    mb, seconds = sharded.local_bytes / 1e6, time.monotonic() - planned
    log.info("loaded %.1f MB of weights in %.1f s, %d blocks sharded", mb, seconds, len(schema.blocks))
    return sharded


def _check_call(
    ranks: int | str | None, blocks: str | None, compile: bool, train: bool, sequence_parallel: bool
) -> None:
    """Raises: ShardError without a process group, or for arguments that exclude each other."""
    if not dist.is_initialized():
        raise ShardError(
            "numadist.shard needs a process group: call torch.distributed.init_process_group('numa') first, "
            "and start the script with numarun"
        )
    if compile and train:
        raise ShardError(
            "compile=True packs weights for inference; with train=True call torch.compile on the result"
        )
    if train and (ranks is not None or blocks is not None):
        raise ShardError("ranks= and blocks= choose for inference; leave them out with train=True")
    if train and sequence_parallel:
        raise ShardError(
            "sequence_parallel=True is for inference: its collectives have no backward; leave it out with train=True"
        )
    for name, value in (("ranks", ranks), ("blocks", blocks)):
        if isinstance(value, str) and value != "auto":
            raise ShardError(f'{name}={value!r}: expected "auto"{" or a number" if name == "ranks" else ""}')


def _planned(
    gm: GraphModule,
    everybody: list[Member],
    group: dist.ProcessGroup,
    ranks: int | str | None,
    blocks: str | None,
    profile: MachineProfile | None,
) -> Schema:
    """The schema, by what is asked and predicted. Rank 0 warns of what is left whole."""
    if isinstance(ranks, int):
        check_count(ranks, everybody, gm)
    if ranks != "auto" and blocks != "auto":
        schema = build_schema(gm, ranks if isinstance(ranks, int) else dist.get_world_size(group))
    else:
        counts = possible_counts(everybody, gm)
        if ranks != "auto":
            counts = [ranks if isinstance(ranks, int) else len(everybody)]
        schema = choose_schema(gm, counts, shared_profile(profile, everybody, group), blocks == "auto")
    if dist.get_rank(group) == 0:
        warn_left_alone(schema)
    return schema


def with_sequence(gm: GraphModule, schema: Schema, warn: bool) -> Schema:
    """The schema with its sums split by tokens where that is possible."""
    sequence = plan_sequence(gm, schema)
    if warn and sequence.all_reduced:
        text = _with_reasons(sequence.all_reduced)
        log.warning("sequence_parallel: sums of these modules are all-reduced as without it: %s", text)
    return replace(schema, sequence=sequence)


def _apply_to_leaders(
    gm: GraphModule, schema: Schema, everybody: list[Member], group: dist.ProcessGroup
) -> int:
    """Rewrite the graph where perhaps only some ranks compute; returns this rank's place among those, else 0."""
    check_count(schema.num_ranks, everybody, gm)
    part = lead(everybody, schema.num_ranks, group)
    if part.index is not None and part.group is not None:
        apply(gm, schema, part.index, emitter_of(part.group))
    if schema.num_ranks < len(everybody):
        share_outputs(gm, group.group_name, leads=part.index is not None)
    return part.index or 0


def open_checkpoint(path: str | Path | None, model: torch.nn.Module) -> Checkpoint | None:
    """The checkpoint at path, of the format its name says; None without a path."""
    if path is None:
        return None
    return (
        GgufCheckpoint(path, model)
        if Path(path).suffix == ".gguf"
        else Checkpoint(path, conversions_of(model))
    )


def check_alike(schema: Schema, group: dist.ProcessGroup) -> None:
    """Raises: ShardError on every rank if ranks captured or planned different graphs; nothing is loaded yet."""
    digest = hashlib.blake2b(schema.to_json().encode(), digest_size=12).hexdigest()
    seen: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, (schema.fingerprint, digest), group=group)
    different = [rank for rank, plan in enumerate(seen) if plan != seen[0]]
    if different:
        raise ShardError(
            f"ranks {different} planned another graph than rank 0: example inputs of other shapes, another config "
            "or another schema; every rank must call numadist.shard with the same"
        )


def emitter_of(group: dist.ProcessGroup) -> Emitter:
    emit = emit_numadist if dist.get_backend(group) == "numa" else emit_functional
    return emit(group.group_name, dist.get_world_size(group))


def warn_left_alone(schema: Schema) -> None:
    """One warning for all layers that run replicated: what, and why."""
    if schema.left_alone and schema.num_ranks > 1:
        log.warning("these layers run replicated on every rank: %s", _with_reasons(schema.left_alone))


def _with_reasons(entries: list[LeftAlone]) -> str:
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        reasons.setdefault(entry.reason, []).append(entry.module)
    return "; ".join(f"{_listed(modules)}: {reason}" for reason, modules in reasons.items())


def _listed(modules: list[str], limit: int = 3) -> str:
    shown = ", ".join(modules[:limit])
    return shown if len(modules) <= limit else f"{shown} and {len(modules) - limit} more"
