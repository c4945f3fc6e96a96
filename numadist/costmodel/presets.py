"""Machines nobody here has: profiles derived from published parts and measurements, with their sources.

"unchecked": from a part's public specification or from memory, not verified against a measurement.
"""

from numadist.costmodel.profile import MachineProfile, Table

_PAPER = "arXiv 2611.07105, table of platforms"
_MIB = 1 << 20
# Shares of the arithmetic peak that packed linear layers and blocked attention reach with Inductor's C++: measured on
# one Sapphire Rapids class machine with AVX-512 (GPT-2 117M in float32), assumed to hold elsewhere.
_GEMM_SHARE, _ATTENTION_SHARE = 0.7, 0.35
_CACHE_BYTES_PER_CYCLE = 8.0
_OVERHEAD = "measured on one Sapphire Rapids class machine, assumed elsewhere"


def _preset(
    name: str,
    nodes: int,
    cores_per_node: int,
    clock_ghz: float,
    flops_per_cycle: float,
    l2_bytes: int,
    local_gbs: float,
    remote_gbs: float,
    remote_ns: float,
    sources: dict[str, str],
) -> MachineProfile:
    bandwidth = tuple(tuple(local_gbs if i == j else remote_gbs for j in range(nodes)) for i in range(nodes))
    peak = clock_ghz * flops_per_cycle
    return MachineProfile(
        name=name,
        nodes=nodes,
        cores_per_node=cores_per_node,
        bandwidth_gbs=bandwidth,
        core_gbs=local_gbs / min(4, cores_per_node),  # a few cores saturate a socket's memory
        cache_gbs=_CACHE_BYTES_PER_CYCLE * clock_ghz,
        gemm_gflops={"float32": {1: 0.1 * peak, 16: 0.5 * peak, 128: _GEMM_SHARE * peak}},
        attention_gflops={"float32": {1: _ATTENTION_SHARE * peak}},
        own_attention_gflops={},
        speedup={1: 1.0},
        all_reduce_us={n: _all_reduce(n, remote_gbs, remote_ns) for n in range(2, nodes + 1)},
        region_us=2.0 + 0.1 * nodes * cores_per_node,
        op_us=5.0,
        clock_ghz=clock_ghz,
        l2_bytes=l2_bytes,
        remote_ns=remote_ns,
        sources={
            "nodes": _PAPER,
            "cores_per_node": _PAPER,
            "clock_ghz": _PAPER,
            "core_gbs": "derived: four cores saturate a node; unchecked",
            "cache_gbs": f"assumed: {_CACHE_BYTES_PER_CYCLE:g} bytes a cycle; unchecked",
            "gemm_gflops": f"derived: {_GEMM_SHARE:g} of the peak of {flops_per_cycle:g} flops a cycle; unchecked",
            "attention_gflops": f"derived: {_ATTENTION_SHARE:g} of the peak; unchecked",
            "own_attention_gflops": "none: nobody has measured it there, so torch's is assumed",
            "speedup": "assumed: linear in cores",
            "all_reduce_us": "derived: two waits, two passes over the links; unchecked",
            "region_us": _OVERHEAD,
            "op_us": _OVERHEAD,
            "l2_bytes": "the part's public specification",
            **sources,
        },
    )


def _all_reduce(ranks: int, remote_gbs: float, remote_ns: float) -> Table:
    """Two waits of a few remote accesses, and every rank reading 2 (R-1)/R of the message from others' memory."""
    sizes = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
    read = 2 * (ranks - 1) / ranks
    return {size: 8e-3 * remote_ns + read * size / remote_gbs / 1e3 for size in sizes}


HASWELL_EP = _preset(
    *("haswell-ep", 2, 6, 2.4, 32.0, 256 << 10, 46.0, 17.0, 145.0),
    sources={
        "bandwidth_gbs": "local: 4 x DDR4-1866, 59.7 GB/s peak, practical share as measured for DDR4-2133, unchecked; "
        "remote: 16.8 GB/s measured with source snoop by Molka et al., ICPP 2015, on another part of the family",
        "remote_ns": "Molka et al., ICPP 2015: 146 ns on another part of the family; unchecked",
    },
)
CASCADE_LAKE = _preset(
    *("cascade-lake", 2, 15, 3.1, 64.0, _MIB, 98.0, 50.0, 140.0),
    sources={
        "bandwidth_gbs": "local: 6 x DDR4-2933, practical 98 of 140.8 GB/s (microway tables); remote: 3 UPI of 10.4 "
        "GT/s scaled from 34 GB/s measured over 2 UPI of a Xeon 8160 (McCalpin); number of links unchecked",
        "remote_ns": "unchecked",
    },
)
HASWELL_EX = _preset(
    *("haswell-ex", 4, 10, 1.9, 32.0, 256 << 10, 45.0, 10.0, 230.0),
    sources={
        "bandwidth_gbs": "local: 4 SMI2 channels; remote: one QPI of 6.4 GT/s a peer, 12.8 GB/s peak; unchecked",
        "remote_ns": "unchecked",
    },
)


def _other(
    name: str,
    nodes: int,
    cores: int,
    clock: float,
    flops: float,
    l2_bytes: int,
    local: float,
    remote: float,
    ns: float,
) -> MachineProfile:
    text = "the part's public specification; unchecked"
    fields = ("nodes", "cores_per_node", "clock_ghz", "bandwidth_gbs", "remote_ns")
    return _preset(
        name, nodes, cores, clock, flops, l2_bytes, local, remote, ns, sources=dict.fromkeys(fields, text)
    )


PRESETS = {
    p.name: p
    for p in (
        HASWELL_EP,
        CASCADE_LAKE,
        HASWELL_EX,
        _other("sapphire-rapids", 2, 56, 2.0, 64.0, 2 * _MIB, 230.0, 115.0, 190.0),
        _other("epyc-rome", 2, 64, 2.6, 32.0, 512 << 10, 171.0, 100.0, 215.0),
        _other("epyc-genoa", 2, 96, 2.4, 32.0, _MIB, 370.0, 150.0, 215.0),
        _other("kunpeng-920", 2, 64, 2.6, 16.0, 512 << 10, 140.0, 60.0, 200.0),
    )
}
