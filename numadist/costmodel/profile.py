"""What the cost model must know of a machine, as frozen data with a source for every number."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from numadist.errors import ConfigError

VERSION = 2  # of the numbers too: a kept profile of another version is measured again

# {size: value}; see `interpolate`.
Table = dict[int, float]


@dataclass(frozen=True)
class MachineProfile:
    """Nodes of equal cores, and how fast they are.

    bandwidth_gbs[i][j]: all cores of node i reading memory of node j. remote_ns: latency of another node's memory.
    core_gbs: one core reading local memory. cache_gbs: one core reading what it has just written, out of its cache.
    gemm_gflops[dtype][rows]: one core in a linear layer with packed weights.
    attention_gflops[kind][keys]: one core in torch's attention; kind: `bfloat16`, `bfloat16 causal`, `bfloat16 dense`.
        What a mask hides counts as computed, so that kernels that skip it show a higher rate.
    own_attention_gflops: the same of numadist::attention, kinds where it is used on this machine.
    speedup[cores]: of a linear layer on so many cores over one core; cores beyond the table scale as its last entry.
    all_reduce_us[ranks][bytes]. region_us: an empty parallel region. op_us: what an op costs beside its work.
    sources: field name -> where its numbers are from.
    """

    name: str
    nodes: int
    cores_per_node: int
    bandwidth_gbs: tuple[tuple[float, ...], ...]
    core_gbs: float
    cache_gbs: float
    gemm_gflops: Mapping[str, Table]
    attention_gflops: Mapping[str, Table]
    own_attention_gflops: Mapping[str, Table]
    speedup: Table
    all_reduce_us: Mapping[int, Table]
    region_us: float
    op_us: float
    clock_ghz: float
    l2_bytes: int
    remote_ns: float
    sources: Mapping[str, str]

    @property
    def num_cores(self) -> int:
        return self.nodes * self.cores_per_node

    @property
    def local_gbs(self) -> float:
        """Local bandwidth of the slowest node."""
        return min(row[i] for i, row in enumerate(self.bandwidth_gbs))

    @property
    def remote_gbs(self) -> float:
        """Bandwidth of the slowest node pair; a machine of one node has only local memory."""
        pairs = [gbs for i, row in enumerate(self.bandwidth_gbs) for j, gbs in enumerate(row) if i != j]
        return min(pairs, default=self.local_gbs)

    def all_reduce_s(self, ranks: int, num_bytes: int) -> float:
        """Seconds of one all-reduce; beyond the measured sizes and ranks they grow in proportion."""
        if ranks == 1:
            return 0.0
        known = min((r for r in self.all_reduce_us if r >= ranks), default=max(self.all_reduce_us))
        table = self.all_reduce_us[known]
        return (
            1e-6 * interpolate(table, num_bytes) * max(1.0, num_bytes / max(table)) * max(1.0, ranks / known)
        )

    def to_json(self) -> str:
        return json.dumps({"numadist_profile": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "MachineProfile":
        """Raises: ConfigError if the text is no profile or of another version."""
        try:
            data = json.loads(text)
            version = data.pop("numadist_profile")
            if version != VERSION:
                raise ConfigError(
                    f"profile version {version}, this numadist reads {VERSION}; measure it again by `numadist profile`"
                )
            data["bandwidth_gbs"] = tuple(map(tuple, data["bandwidth_gbs"]))
            for field in ("gemm_gflops", "attention_gflops", "own_attention_gflops"):
                data[field] = {dtype: _table(table) for dtype, table in data[field].items()}
            data["speedup"] = _table(data["speedup"])
            data["all_reduce_us"] = {int(ranks): _table(t) for ranks, t in data["all_reduce_us"].items()}
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a numadist profile: {type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "MachineProfile":
        return cls.from_json(Path(path).read_text())


def attention_kind(dtype: str, mask: str) -> str:
    """Name of a table of attention rates. mask: causal | dense (a tensor) | empty."""
    return f"{dtype} {mask}".strip()


def _table(data: Mapping[str, float]) -> Table:
    return {int(size): float(value) for size, value in data.items()}


def interpolate(table: Table, size: float) -> float:
    """Value at `size`: straight lines between the points in logarithms, the nearest point's value beyond them."""
    points = sorted(table.items())
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    above = next(i for i, (known, _) in enumerate(points) if known >= size)
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return y0 * math.exp(slope * math.log(size / x0))
