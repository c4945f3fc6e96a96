"""The one way from a model to what a rank runs: captured -> schema -> this rank's model -> compiled.

`numadist.shard`, generation, the in-process variant, the harness and `explain` all go it; what each pass of a stage
needs and leaves stands in passes.py.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from numadist.graph.capture import CapturedModel, described, export
from numadist.graph.passes import run_passes
from numadist.lowering.compiled_model import CompiledModel, layers_repeat
from numadist.lowering.compiled_step import CompiledStep
from numadist.lowering.freezing import compile_frozen
from numadist.lowering.packing import has_halves
from numadist.lowering.quantized import reads_codes
from numadist.memory.local import local_empty
from numadist.pipeline import passes
from numadist.pipeline.quantize import Quantization, quantize_parameters
from numadist.pipeline.remember import remembered
from numadist.sharding.apply import apply, check_fits
from numadist.sharding.collectives import Emitter
from numadist.sharding.schema import Schema
from numadist.weights.checkpoint import Checkpoint
from numadist.weights.formats import open_checkpoint
from numadist.weights.load import Allocate, WeightsFile, localize_parameters


def capture(
    model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any = None, train: bool = False
) -> CapturedModel:
    """First stage: the model as one graph, in the form that is planned. Arguments and errors are those of `export`.

    A graph that was captured before, of the same code at inputs of the same shapes, is read from the cache folder.
    """

    def fresh() -> GraphModule:
        gm = export(model, example_inputs, dynamic_shapes, train).gm
        run_passes(gm, passes.CAPTURE)
        return gm

    gm = remembered(fresh, model, example_inputs, dynamic_shapes, train)
    return described(gm, model, example_inputs, dynamic_shapes)


def copy_of(captured: CapturedModel) -> CapturedModel:
    """Another graph over the same parameters and buffers."""
    return replace(captured, gm=_copied(captured.gm))


@dataclass(frozen=True)
class Site:
    """Where one rank's part goes, and how it talks to the others.

    emitter: writes collectives into the graph; None: one rank, which has none.
    allocate: fresh contiguous memory for this rank's weights.
    finish: a last rewrite of the graph before weights are loaded.
    """

    rank: int
    emitter: Emitter | None
    allocate: Allocate = local_empty
    train: bool = False
    finish: Callable[[GraphModule], None] | None = None


@dataclass
class LocalModel:
    """One rank's part of a model: its graph, with local sizes, collectives and only this rank's weights."""

    gm: GraphModule
    schema: Schema
    rank: int
    constants: Mapping[str, Any]
    one_shape: bool
    train: bool = False
    name: str = ""
    training: bool = False  # mode of the model
    hidden_dropout: bool = False
    tied_names: Mapping[str, list[str]] = field(default_factory=dict)
    unused_names: frozenset[str] = frozenset()  # of the model's state that its graph does not read
    has_packed: bool = False  # plain weights have made way for packed ones

    @property
    def num_bytes(self) -> int:
        """Of the parameters this rank holds, tied names counted once."""
        return sum(p.numel() * p.element_size() for p in self.gm.parameters())

    def compile(self) -> Callable[..., Any]:
        """Last stage: Inductor's C++ with weights packed once; of layers that repeat, one of each kind.

        The first call of every combination of input sizes takes the time that compilation takes.
        """
        if not self.train and layers_repeat(self.gm):
            return CompiledModel(self.gm, self._pack, self.name)
        run_passes(self.gm, passes.INFERENCE)
        self.has_packed |= has_halves(self.gm)
        return compile_frozen(self.gm, one_shape=self.one_shape)

    def _pack(self, gm: GraphModule) -> None:
        run_passes(gm, passes.PACKED, runs=False)
        self.has_packed = True

    def compile_step(self) -> CompiledStep:
        """Last stage of a step of generation: two graphs over weights packed once."""
        run_passes(self.gm, passes.PACKED, runs=False)
        decode = _copied(self.gm)
        run_passes(decode, passes.DECODE, runs=False)
        return CompiledStep(self.gm, decode)


def localize(
    captured: CapturedModel,
    schema: Schema,
    site: Site,
    checkpoint: Checkpoint | None = None,
    quantization: Quantization | None = None,
) -> LocalModel:
    """Third stage: turn the captured graph, which this takes over, into the graph of one rank, and load its weights.

    checkpoint: where values of parameters without memory are read from. quantization: which weights become codes.
    Raises: ShardError if the schema does not fit the graph, or a tensor is missing in the checkpoint.
    """
    gm = captured.gm
    check_fits(gm, schema)
    if site.emitter is not None:
        apply(gm, schema, site.rank, site.emitter)
    if site.finish is not None:
        site.finish(gm)
    file = weights_file(checkpoint, captured)
    if quantization is not None:
        quantize_parameters(gm, schema, site.rank, site.allocate, file, quantization)
    localize_parameters(gm, schema, site.rank, site.allocate, file, site.train)
    own = gm.state_dict(keep_vars=True)
    return LocalModel(
        gm,
        replace(schema, graph=None),
        site.rank,
        captured.constants,
        captured.one_shape,
        site.train,
        captured.name,
        captured.training,
        captured.hidden_dropout,
        captured.tied_names,
        captured.state_names - frozenset(own),
        has_packed=any(reads_codes(node) for node in gm.graph.nodes),
    )


def checkpoint_of(path: str | Path | None, model: torch.nn.Module, warn: bool = False) -> Checkpoint | None:
    """The checkpoint of a model at a path; None without one. warn: of tensors that the model does not use."""
    if path is None:
        return None
    checkpoint = open_checkpoint(path, model)
    if warn:
        buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
        checkpoint.warn_of_unused([*dict(model.named_parameters(remove_duplicate=False)), *buffers])
    return checkpoint


def weights_file(checkpoint: Checkpoint | None, captured: CapturedModel) -> WeightsFile | None:
    """The checkpoint, with what the model's other names for its parameters are."""
    if checkpoint is None:
        return None
    return WeightsFile(checkpoint, captured.tied_names, captured.persistent_buffers)


def _copied(gm: GraphModule) -> GraphModule:
    """Another graph module over the same tensors."""
    shared: dict[int, Any] = {id(t): t for t in (*gm.parameters(), *gm.buffers())}
    with warnings.catch_warnings():  # torch.export's own, when its result is copied
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(gm, shared)
