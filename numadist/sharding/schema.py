"""The partition schema: every decision of the compiler as data. JSON in, JSON out, versioned, editable.

Deleting a block from the JSON leaves that block replicated. Names of values are the nodes of the exported graph,
which torch.export makes the same way on every rank.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from numadist.errors import ShardError
from numadist.sharding.placement import Shard

VERSION = 4
# 2 has no `sequence`; 2 and 3 use all ranks of the group they are for, and call a gathered output `gathered`.
_READABLE = (2, 3, VERSION)


# Kind of a block: a layer computed by parts whose whole output every rank needs.
GATHERED_OUTPUT = "gathered output"


@dataclass
class Block:
    """One sharded block. `values` of an op that returns a list are keyed `name.index`."""

    # attention | gated mlp | mlp | experts | vocabulary | gathered output: for people, read off the ops inside
    kind: str
    module: str  # path of the innermost module that holds the whole block
    sink: str | None  # row-parallel layer: its output is partial; none in a vocabulary block
    columns: list[str]  # column-parallel layers
    units: list[int]  # the cut falls on multiples of these indices of the sink's contracted dim
    params: dict[str, Shard]  # sharded parameters
    partial_params: list[str]  # kept by rank 0, zero elsewhere: the bias of the row-parallel layer
    values: dict[str, Shard]  # sharded activations
    slices: dict[str, tuple[Shard, list[str]]]  # replicated value -> (part a rank takes, nodes that take it)
    lookups: list[str] = field(
        default_factory=list
    )  # embeddings of a table cut over its rows: output is partial
    heads: list[str] = field(default_factory=list)  # linear layers over that table: output is gathered


@dataclass
class LeftAlone:
    """A linear layer that runs replicated, and the reason in words."""

    module: str
    node: str
    reason: str


@dataclass
class Sequence:
    """What lies between blocks, split by tokens: a rank computes its own share.

    Removing a value from `values` has it computed whole on every rank again.
    """

    # A partial sum among them is reduce-scattered instead of all-reduced.
    values: dict[str, Shard]
    all_reduced: list[LeftAlone]  # sums that every rank gets whole all the same


@dataclass
class BlockCost:
    """Predicted milliseconds of one block, split over the ranks with its sum, and whole on every rank."""

    module: str
    kind: str
    sharded_ms: float
    whole_ms: float
    sharded: bool  # what was chosen


@dataclass
class Candidate:
    """A plan that was considered. num_ranks: 1 is one rank with the cores of all."""

    num_ranks: int
    predicted_ms: float
    num_blocks: int  # sharded
    rejected: str = ""  # why; empty for the chosen one


@dataclass
class Costs:
    """What the cost model predicted when it chose: for people, not used again."""

    profile: str  # name of the machine profile
    candidates: list[Candidate]
    blocks: list[BlockCost]  # of the chosen number of ranks


@dataclass
class CodedWeights:
    """What a parameter becomes that is not kept as plain numbers: for people and for costs."""

    layout: str  # "4 bits, scale per 32"
    bytes_per_weight: float


@dataclass
class Schema:
    """Every decision for one model on one number of ranks.

    num_ranks: ranks that compute. group_size: ranks of the group it was planned for, if that is more: each rank that
    computes has the cores of several, and the others only receive the result.
    graph: what it was planned on, its parameters without memory; not written to a file.
    """

    num_ranks: int
    fingerprint: str  # of the exported graph: a schema fits one model and one set of parameter shapes
    blocks: list[Block] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    costs: Costs | None = None  # of an automatic choice
    sequence: Sequence | None = None  # sequence parallelism, if it was asked for
    group_size: int = 0
    codes: dict[str, CodedWeights] = field(default_factory=dict)  # by parameter, if it was planned for such
    graph: GraphModule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.group_size = self.group_size or self.num_ranks

    def param_shards(self) -> dict[str, Shard]:
        """Placement of every sharded parameter; all others are replicated."""
        return {name: shard for block in self.blocks for name, shard in block.params.items()}

    def partial_params(self) -> set[str]:
        """Biases of row-parallel layers: rank 0 adds them, to a sum that is complete only after the all-reduce."""
        return {name for block in self.blocks for name in block.partial_params}

    def partial_values(self) -> set[str]:
        """Values that are a sum still missing the other ranks, where they are made."""
        sinks = {block.sink for block in self.blocks if block.sink is not None}
        return sinks | {name for block in self.blocks for name in block.lookups}

    def to_json(self) -> str:
        """The decisions as text, the same on every rank that planned the same graph."""
        data: dict[str, Any] = {
            "numadist_schema": VERSION,
            "num_ranks": self.num_ranks,
            "group_size": self.group_size,
            "fingerprint": self.fingerprint,
            "blocks": [_block_to_json(b) for b in self.blocks],
            "left_alone": [asdict(entry) for entry in self.left_alone],
            "costs": None if self.costs is None else asdict(self.costs),
            "sequence": None if self.sequence is None else _sequence_to_json(self.sequence),
        }
        if self.codes:
            data["codes"] = {name: asdict(entry) for name, entry in self.codes.items()}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Raises: ShardError if the text is no schema or of another version."""
        try:
            data = json.loads(text)
            version = data.pop("numadist_schema")
        except (ValueError, KeyError, AttributeError):
            raise ShardError('not a numadist schema: expected JSON with the key "numadist_schema"') from None
        if version not in _READABLE:
            raise ShardError(
                f"schema version {version}, this numadist reads {_READABLE}; plan the model again"
            )
        try:
            data["blocks"] = [_block_from_json(b) for b in data["blocks"]]
            data["left_alone"] = [LeftAlone(**entry) for entry in data["left_alone"]]
            data["costs"] = _costs_from_json(data.get("costs"))
            data["sequence"] = _sequence_from_json(data.get("sequence"))
            data["codes"] = {name: CodedWeights(**entry) for name, entry in data.get("codes", {}).items()}
            return cls(**data)
        except (TypeError, KeyError, ValueError) as e:
            raise ShardError(f"damaged numadist schema: {type(e).__name__}: {e}") from None

    def save(self, path: str | Path) -> None:
        """Write to_json() to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Schema":
        """What save() has written, perhaps edited. Raises: ShardError as from_json; OSError."""
        return cls.from_json(Path(path).read_text())


_PLAIN_FIELDS = ("kind", "module", "sink", "columns", "units", "partial_params", "lookups", "heads")


def _block_to_json(block: Block) -> dict[str, Any]:
    return {
        **{k: getattr(block, k) for k in _PLAIN_FIELDS},
        "params": {name: shard.to_json() for name, shard in block.params.items()},
        "values": {name: shard.to_json() for name, shard in block.values.items()},
        "slices": {name: [shard.to_json(), users] for name, (shard, users) in block.slices.items()},
    }


def _block_from_json(data: Mapping[str, Any]) -> Block:
    # Before version 4 it was called `gathered`.
    kind = GATHERED_OUTPUT if data["kind"] == "gathered" else data["kind"]
    return Block(
        **{
            **data,
            "kind": kind,
            "params": {n: Shard.from_json(s) for n, s in data["params"].items()},
            "values": {n: Shard.from_json(s) for n, s in data["values"].items()},
            "slices": {n: (Shard.from_json(s), list(users)) for n, (s, users) in data["slices"].items()},
        }
    )


def _sequence_to_json(sequence: Sequence) -> dict[str, Any]:
    return {
        "values": {name: shard.to_json() for name, shard in sequence.values.items()},
        "all_reduced": [asdict(entry) for entry in sequence.all_reduced],
    }


def _sequence_from_json(data: Mapping[str, Any] | None) -> Sequence | None:
    if data is None:
        return None
    return Sequence(
        {name: Shard.from_json(shard) for name, shard in data["values"].items()},
        [LeftAlone(**entry) for entry in data["all_reduced"]],
    )


def _costs_from_json(data: Mapping[str, Any] | None) -> Costs | None:
    if data is None:
        return None
    return Costs(
        data["profile"],
        [Candidate(**entry) for entry in data["candidates"]],
        [BlockCost(**entry) for entry in data["blocks"]],
    )
