"""`numadist.shard`: an unmodified model in, this rank's part of it out."""

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from numadist.errors import ShardError
from numadist.graph.capture import CapturedModel
from numadist.log import get_logger
from numadist.pipeline.active_ranks import active_site, members
from numadist.pipeline.gradients import count_over_ranks
from numadist.pipeline.quantize import Quantization, check_quantization
from numadist.pipeline.sharded_model import ShardedModel
from numadist.pipeline.stages import Site, capture, checkpoint_of, localize
from numadist.sharding.build_schema import build_schema
from numadist.sharding.collectives import emitter_of
from numadist.sharding.reasons import warn_left_alone
from numadist.sharding.schema import Schema
from numadist.sharding.training import emit_trainable

log = get_logger(__name__)


def shard(
    model: torch.nn.Module,
    example_inputs: Any,
    *,
    schema: Schema | None = None,
    group: dist.ProcessGroup | None = None,
    dynamic_shapes: Any = None,
    weights: str | Path | None = None,
    quantization: Quantization | None = None,
    compile: bool = False,
    train: bool = False,
) -> ShardedModel:
    """Split an unmodified model over the ranks of `group`; a collective call: every rank makes it alike.

    example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs, equal in shape on all ranks.
    schema: decisions of `numadist.plan`, perhaps edited and loaded from a file; default: every layer that can be split
        over all ranks is.
    group: default the whole job.
    dynamic_shapes: as torch.export.export takes it, for inputs whose sizes change between calls.
    weights: a .safetensors file or a folder of them, or a .gguf file, for a model made under
        `numadist.empty_parameters()`: only this rank's slices are read, into memory of its node.
    quantization: "auto" computes on the codes of a quantized file as they are; "int8" and "int4" round all layers and
        tables while they are loaded. None: on plain numbers, into which codes are widened.
    compile: torch.compile this rank's graph, for inference with weights packed once ("freezing").
    train: give the collectives their backward, and gradients to the parameters that have them in the model. Ranks draw
        the same random numbers. docs/training.md has what is supported.
    Keeps no reference to the full weights; drop yours to free them.
    Raises: ShardError if the model cannot be captured, no group exists, the schema does not fit, or for compile or
        quantization and train at once.
    """
    check_quantization(quantization, train)
    if compile and train:
        raise ShardError(
            "compile=True packs weights for inference, train=True changes them: choose one of the two"
        )
    pg = _group(group)
    begin = time.monotonic()
    captured = capture(model, example_inputs, dynamic_shapes, train)
    schema = schema or _planned(captured, pg)
    check_group(schema, dist.get_world_size(pg), train)
    check_alike(schema, pg)
    planned = time.monotonic()
    log.info("planned %s for %d ranks in %.1f s", captured.name, schema.num_ranks, planned - begin)
    site = _site(captured, schema, pg, train)
    checkpoint = checkpoint_of(weights, model, warn=dist.get_rank(pg) == 0)
    sharded = ShardedModel(localize(captured, schema, site, checkpoint, quantization), pg)
    if train:
        count_over_ranks(sharded)
    elif sharded.training and dist.get_rank(pg) == 0:
        log.warning(
            "%s is in training mode, and so is what becomes of it; call model.eval() for inference",
            captured.name,
        )
    if compile:
        sharded.compile_local()
    mb = sharded.local_bytes / 1e6
    log.info(
        "loaded %.1f MB in %.1f s, %d blocks sharded", mb, time.monotonic() - planned, len(schema.blocks)
    )
    return sharded


def _group(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ShardError(
            "numadist.shard needs a process group: call torch.distributed.init_process_group('numa') first, "
            "and start the script with numarun"
        )
    group = given if given is not None else dist.group.WORLD
    assert group is not None  # initialized
    return group


def _planned(captured: CapturedModel, group: dist.ProcessGroup) -> Schema:
    """Every layer that can be split over all ranks is."""
    schema = build_schema(captured, dist.get_world_size(group))
    if dist.get_rank(group) == 0:
        warn_left_alone(schema)
    return schema


def _site(captured: CapturedModel, schema: Schema, group: dist.ProcessGroup, train: bool) -> Site:
    """How this rank takes part. Collective where only some ranks of the group compute."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if schema.num_ranks < num_ranks:
        return active_site(captured, schema, members(group), group)
    if train:
        return Site(rank, emit_trainable(group.group_name, rank, num_ranks), train=True)
    return Site(rank, emitter_of(group))


def check_group(schema: Schema, num_ranks: int, train: bool = False) -> None:
    """Raises: ShardError if the schema was made for another number of ranks, or cannot be trained."""
    if schema.group_size != num_ranks:
        raise ShardError(
            f"the schema is for {schema.group_size} ranks, this group has {num_ranks}; plan it again"
        )
    if train and schema.num_ranks < schema.group_size:
        raise ShardError(
            f"this schema uses {schema.num_ranks} of {schema.group_size} ranks, which is for inference; "
            "plan the model for all of them to train it"
        )


def check_alike(schema: Schema, group: dist.ProcessGroup) -> None:
    """Raises: ShardError on every rank if ranks captured or planned different graphs; nothing is loaded yet."""
    digest = hashlib.blake2b(schema.to_json().encode(), digest_size=12).hexdigest()
    seen: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, (schema.fingerprint, digest), group=group)
    different = [rank for rank, found in enumerate(seen) if found != seen[0]]
    if different:
        raise ShardError(
            f"ranks {different} planned another graph than rank 0: example inputs of other shapes, another config "
            "or another schema; every rank must call numadist.shard with the same"
        )
