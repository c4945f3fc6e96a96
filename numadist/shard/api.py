"""`numadist.shard`: an unmodified model in, this rank's part of it out."""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.log import get_logger
from numadist.memory.local import local_empty
from numadist.shard.apply import apply, check_fits
from numadist.shard.blocks import build_schema
from numadist.shard.capture import as_args, capture
from numadist.shard.checkpoint import Checkpoint
from numadist.shard.compiled import compile_frozen
from numadist.shard.gguf import GgufCheckpoint
from numadist.shard.load import localize_parameters
from numadist.shard.reduce import Emitter, emit_functional, emit_numadist
from numadist.shard.schema import Schema
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
) -> ShardedModel:
    """Split an unmodified model over the ranks of `group`; a collective call: every rank makes it alike.

    example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs, equal in shape on all ranks.
    dynamic_shapes: as torch.export.export takes it, for inputs whose sizes change between calls.
    weights: a .safetensors file or a folder of them, or a .gguf file, for a model made under
        `numadist.empty_parameters()`: only this rank's slices are read, into memory of its node.
    compile: torch.compile this rank's graph for inference, weights packed once ("freezing"; compiled.py).
    train: give the collectives their backward and the parameters gradients. Dropout in training mode is not sharded.
    schema: decisions to use instead of planning, e.g. an edited `Schema.load(path)`.
    Keeps no reference to the full weights; drop yours to free them.
    Raises: ShardError if the model cannot be captured, no group exists, or the schema does not fit.
    """
    if not dist.is_initialized():
        raise ShardError(
            "numadist.shard needs a process group: call torch.distributed.init_process_group('numa') first, "
            "and start the script with numarun"
        )
    if compile and train:
        raise ShardError(
            "compile=True packs weights for inference; with train=True call torch.compile on the result"
        )
    pg = group if group is not None else dist.group.WORLD
    rank, num_ranks = dist.get_rank(pg), dist.get_world_size(pg)
    args, kwargs = as_args(example_inputs)
    begin = time.monotonic()
    gm = capture(model, args, kwargs, dynamic_shapes)
    if schema is None:
        schema = build_schema(gm, num_ranks)
        if rank == 0:
            warn_left_alone(schema)
    check_fits(gm, schema, num_ranks)
    check_alike(schema, pg)
    planned = time.monotonic()
    log.info("planned %s for %d ranks in %.1f s", type(model).__name__, num_ranks, planned - begin)
    emit = emit_trainable(pg.group_name, rank, num_ranks) if train else emitter_of(pg)
    apply(gm, schema, rank, emit)
    checkpoint = open_checkpoint(weights, model) if weights is not None else None
    localize_parameters(gm, schema, rank, local_empty, checkpoint, train)
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    sharded = ShardedModel(gm, schema, rank, constants)
    if compile:
        sharded.compile_local(one_shape=dynamic_shapes is None)
    log.info(
        "loaded %.1f MB of weights in %.1f s, %d blocks sharded",
        sharded.local_bytes / 1e6,
        time.monotonic() - planned,
        len(schema.blocks),
    )
    return sharded


def open_checkpoint(path: str | Path, model: torch.nn.Module) -> Checkpoint:
    """The checkpoint at path, of the format its name says."""
    return GgufCheckpoint(path, model) if Path(path).suffix == ".gguf" else Checkpoint(path)


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
    if not schema.left_alone or schema.num_ranks == 1:
        return
    reasons: dict[str, list[str]] = {}
    for entry in schema.left_alone:
        reasons.setdefault(entry.reason, []).append(entry.module)
    text = "; ".join(f"{_listed(modules)}: {reason}" for reason, modules in reasons.items())
    log.warning("these layers run replicated on every rank: %s", text)


def _listed(modules: list[str], limit: int = 3) -> str:
    shown = ", ".join(modules[:limit])
    return shown if len(modules) <= limit else f"{shown} and {len(modules) - limit} more"
