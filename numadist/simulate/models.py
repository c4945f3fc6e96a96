"""The work of a model at any batch and sequence, from captured graphs of one and two layers without weights."""

import functools
from typing import Any

import torch
from torch.export import Dim

from numadist import models
from numadist.costmodel.op_work import Work, extrapolated
from numadist.costmodel.software import Software
from numadist.errors import NumadistError
from numadist.graph import query
from numadist.pipeline.stages import capture
from numadist.sharding.build_schema import build_schema
from numadist.sharding.count_work import work_of
from numadist.sharding.schema import Schema
from numadist.weights.fake import empty_parameters

_MAX_BATCH = 1 << 12


class ModelWork:
    """A model of numadist.models at any batch, sequence and number of ranks.

    All its layers do the same work, so a graph of one layer and one of two, captured once with symbolic sizes, tell
    that of all. longest: positions it has room for.
    Raises: NumadistError for a model that is not built from a config.
    """

    def __init__(self, name: str, longest: int, dtype: torch.dtype = torch.float32):
        if name not in models.MODELS:
            raise NumadistError(f"cannot simulate {name!r}; known: {', '.join(models.MODELS)}")
        self.layers, option = _layers(name)
        self.one = _Captured(name, longest, dtype, {option: 1})
        self.two = _Captured(name, longest, dtype, {option: 2})

    def work(self, num_ranks: int, batch: int, seq: int, software: Software) -> Work:
        """One forward split over the ranks as the software splits it, alike ops taken together."""
        sizes = (num_ranks, batch, seq, software.splits_vocabulary)
        return extrapolated(self.one.work(*sizes), self.two.work(*sizes), self.layers)


class _Captured:
    """One graph, its batch and sequence symbolic."""

    def __init__(self, name: str, longest: int, dtype: torch.dtype, changes: dict[str, int]):
        with empty_parameters():
            model = models.build(name, dtype, max_position_embeddings=longest, **changes)
        inputs = models.prefill_inputs(model, 2, min(longest, 64))
        dims = {"input_ids": {0: Dim("batch", min=1, max=_MAX_BATCH), 1: Dim("seq", min=2, max=longest)}}
        self.captured = capture(model, inputs, dims)
        tokens = next(n for n in self.captured.gm.graph.nodes if n.op == "placeholder")
        self.symbols = [s.node.expr for s in query.shape(tokens)]
        self._schemas: dict[tuple[int, bool], Schema] = {}

    def work(self, num_ranks: int, batch: int, seq: int, vocabulary: bool) -> Work:
        values = dict(zip(self.symbols, (batch, seq), strict=True))

        @functools.cache
        def evaluated(expr: Any) -> int:
            return int(expr.subs(values))

        def size(s: Any) -> int:
            return s if query.is_static(s) else evaluated(s.node.expr)

        return work_of(self.captured.gm, self._schema(num_ranks, vocabulary), size).merged()

    def _schema(self, num_ranks: int, vocabulary: bool) -> Schema:
        """vocabulary: split embedding tables and heads too."""
        key = (num_ranks, vocabulary)
        if key not in self._schemas:
            schema = build_schema(self.captured, num_ranks)
            if not vocabulary:
                schema.blocks = [b for b in schema.blocks if b.kind != "vocabulary"]
            self._schemas[key] = schema
        return self._schemas[key]


def _layers(name: str) -> tuple[int, str]:
    """Number of the model's layers and the option of its config that sets it."""
    config = models.config_of(name)
    return config.num_hidden_layers, "n_layer" if hasattr(config, "n_layer") else "num_hidden_layers"
