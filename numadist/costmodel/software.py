"""What a runtime makes of a machine: whose kernels, how they use memory, how they add partial sums."""

from collections.abc import Mapping
from dataclasses import dataclass, field

KIB = 1 << 10


@dataclass(frozen=True)
class Software:
    """Constants of one runtime; times follow from them and a MachineProfile in price.py.

    flops_per_cycle: of a core's arithmetic; None: the profile's own rates of packed linear layers and attention.
    bytes_per_flop: a linear layer's memory traffic with 256 KiB of L2 per core, because tiles are read again; it
        falls with the l2_exponent-th power of the L2.
    score_bytes: traffic per element of attention's score matrix, under the same rule; 0: never written to memory.
    activations_in_cache: other ops move their data at the cache's speed, else at the memory's.
    balancing: share that the kernel's NUMA balancing adds to a process without a memory policy.
    one_node_slowdown: of a process held on one node, beyond having fewer cores and less bandwidth.
    own_attention: ranks run our attention where the profile has rates of it; one process runs torch's in any case.
    sum_passes[ranks]: passes over a partial sum by one core reading remote memory; empty: the profile's all_reduce.
    """

    name: str
    flops_per_cycle: float | None = None
    bytes_per_flop: float = 0.0
    l2_exponent: float = 0.0
    score_bytes: float = 0.0
    activations_in_cache: bool = True
    balancing: float = 0.0
    one_node_slowdown: float = 1.0
    own_attention: bool = False
    sum_passes: Mapping[int, float] = field(default_factory=dict)
    splits_vocabulary: bool = True

    def traffic_factor(self, l2_bytes: int) -> float:
        return (256 * KIB / l2_bytes) ** self.l2_exponent


# Ours: Inductor's C++ with packed weights, attention in blocks, the core's all_reduce.
NUMADIST = Software("numadist", own_attention=True)

# The system of arXiv 2611.07105 and its baseline, torch.compile with Triton-CPU. The constants are fitted:
# benchmarks/simulator_validation.py --fit, docs/simulator.md. 32 flops per cycle are two AVX2 multiply-adds.
NUMA_TORCH = Software(
    "numa-torch",
    flops_per_cycle=32.0,
    bytes_per_flop=0.385,
    l2_exponent=2.09,
    score_bytes=794.0,
    activations_in_cache=False,
    balancing=0.102,
    one_node_slowdown=1.356,
    sum_passes={2: 1.0, 4: 178.0},
    splits_vocabulary=False,
)
SOFTWARE = {s.name: s for s in (NUMADIST, NUMA_TORCH)}
