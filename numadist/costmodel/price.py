"""Seconds of a forward: sharded over ranks, or in one process that knows nothing of nodes.

An op takes its arithmetic, its memory traffic and its dispatch one after the other. Nothing overlaps: a model that
says so orders candidates as well as a finer one and has fewer constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from numadist.costmodel.op_work import OpWork, Reduction, Work
from numadist.costmodel.profile import MachineProfile, Table, attention_kind, interpolate
from numadist.costmodel.software import Software
from numadist.errors import ConfigError

POLICIES = ("default", "interleave", "localalloc", "one-node")
# Cache lines a core can wait for at once (line fill buffers of x86 cores since Nehalem).
_LINES_IN_FLIGHT, _LINE_BYTES = 10, 64


@dataclass(frozen=True)
class CoreGroup:
    """The cores that run one copy of the graph, and the memory bandwidth they get together."""

    cores: int
    stream_gbs: float


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a block's own ops: split over the ranks with their sums, and whole on every rank."""

    sharded_s: float
    replicated_s: float

    @property
    def pays(self) -> bool:
        return self.sharded_s < self.replicated_s


def rank_cores(profile: MachineProfile, ranks: int) -> CoreGroup:
    """One of `ranks` equal ranks, each on its own node or its share of one."""
    cores = max(1, profile.num_cores // ranks)
    per_node = max(1.0, ranks / profile.nodes)
    # A rank over several nodes reads its shards from all of them, like a process that knows of none.
    nodes = max(1, profile.nodes // ranks)
    stream = profile.local_gbs / per_node if nodes == 1 else _oblivious_gbs(profile, nodes)
    return CoreGroup(cores, min(stream, profile.core_gbs * cores))


def process_cores(profile: MachineProfile, policy: str) -> CoreGroup:
    """One process on the whole machine, or on its first node. Raises: ConfigError for an unknown policy."""
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    if policy == "one-node":
        return CoreGroup(profile.cores_per_node, profile.local_gbs)
    if policy == "interleave":
        return CoreGroup(profile.num_cores, profile.nodes * min(profile.remote_gbs, profile.local_gbs))
    return CoreGroup(profile.num_cores, _oblivious_gbs(profile, profile.nodes))


def _oblivious_gbs(profile: MachineProfile, nodes: int) -> float:
    """A share (N-1)/N of the reads is of another node's memory: the weights lie where the loading thread ran, and
    activations where another node's threads wrote them. The links and that one node's memory bound all cores.
    """
    return min(nodes * profile.remote_gbs, profile.local_gbs) if nodes > 1 else profile.local_gbs


def process_s(work: Work, profile: MachineProfile, software: Software, policy: str = "default") -> float:
    """One process under a memory policy, unsharded and with torch's own attention."""
    group, software = process_cores(profile, policy), replace(software, own_attention=False)
    seconds = sum(op_s(op, 1.0, group, work.dtype, profile, software) for op in work.ops)
    if policy == "one-node":
        return seconds * software.one_node_slowdown
    return seconds * (1 + software.balancing) if policy == "default" and profile.nodes > 1 else seconds


def sharded_s(work: Work, profile: MachineProfile, software: Software) -> float:
    """All ranks together, the slowest one counting: its shards, what every rank does whole, and the sums.

    One rank is a process that runs what ranks run.
    """
    group = rank_cores(profile, work.num_ranks)
    seconds = sum(op_s(op, op.share, group, work.dtype, profile, software) for op in work.ops)
    return seconds + sum(reduction_s(r, work.num_ranks, profile, software) for r in work.reductions)


def block_costs(work: Work, profile: MachineProfile, software: Software) -> list[BlockCost]:
    """Of every block of the schema, in its order."""
    group = rank_cores(profile, work.num_ranks)
    sharded, whole = [0.0] * work.num_blocks, [0.0] * work.num_blocks
    for op in work.ops:
        if op.block is not None:
            sharded[op.block] += op_s(op, op.share, group, work.dtype, profile, software)
            whole[op.block] += op_s(op, 1.0, group, work.dtype, profile, software)
    for r in work.reductions:
        sharded[r.block] += reduction_s(r, work.num_ranks, profile, software)
    return [BlockCost(*pair) for pair in zip(sharded, whole, strict=True)]


def op_s(
    op: OpWork, share: float, group: CoreGroup, dtype: str, profile: MachineProfile, software: Software
) -> float:
    """One op on one team that does `share` of it."""
    factor = software.traffic_factor(profile.l2_bytes)
    streamed, cached = op.weight_bytes + factor * software.score_bytes * op.scores, 0.0
    if op.kind == "linear":
        streamed += factor * software.bytes_per_flop * op.flops
    if software.activations_in_cache:
        # A rate measured in a linear layer or attention has the time of their own data in it already.
        cached = op.activation_bytes if op.kind == "other" else 0.0
    else:
        streamed += op.activation_bytes
    seconds = share * (
        op.flops / (1e9 * _gflops(op, dtype, group, profile, software))
        + streamed / (1e9 * group.stream_gbs)
        + cached / (1e9 * profile.cache_gbs * group.cores)
    )
    return seconds + 1e-6 * op.count * (profile.op_us + (profile.region_us if group.cores > 1 else 0.0))


def reduction_s(r: Reduction, ranks: int, profile: MachineProfile, software: Software) -> float:
    if not software.sum_passes:
        return r.weight * profile.all_reduce_s(ranks, r.num_bytes)
    remote_core_gbs = _LINES_IN_FLIGHT * _LINE_BYTES / profile.remote_ns
    return r.weight * software.sum_passes[ranks] * r.num_bytes / (1e9 * remote_core_gbs)


def _gflops(op: OpWork, dtype: str, group: CoreGroup, profile: MachineProfile, software: Software) -> float:
    if software.flops_per_cycle is not None:
        return software.flops_per_cycle * profile.clock_ghz * group.cores
    if op.kind == "attention":
        table, size = _attention_rates(op, dtype, profile, software), op.keys
    else:
        table, size = _rates_of(profile.gemm_gflops, dtype), op.rows
    return interpolate(table, size) * _scaling(group.cores, profile)


def _attention_rates(op: OpWork, dtype: str, profile: MachineProfile, software: Software) -> Table:
    """By number of keys, of the kernel that computes it."""
    own = profile.own_attention_gflops.get(attention_kind(dtype, op.mask))
    if own and op.fits_ours and software.own_attention:
        return own
    # Masks that are known in advance are named in a rank's graph only; a model as it is compares dense ones.
    mask = "dense" if op.mask and not software.own_attention else op.mask
    return _rates_of(profile.attention_gflops, attention_kind(dtype, mask), dtype)


def _rates_of(rates: Mapping[str, Table], *names: str) -> Table:
    """The first one that is known, else that of float32."""
    return next((rates[name] for name in names if name in rates), rates["float32"])


def _scaling(cores: int, profile: MachineProfile) -> float:
    known = max(profile.speedup)
    return interpolate(profile.speedup, cores) * max(1.0, cores / known)
