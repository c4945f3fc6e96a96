"""Which CPUs share what: packages, nodes, caches, clusters and cores, each as a partition of the usable CPUs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numadist.topology.machine import Machine
from numadist.topology.sysfs import CPU, read_set, read_text

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Block:
    """CPUs that share one resource. attrs: what two blocks must agree in to be interchangeable."""

    cpus: tuple[int, ...]
    attrs: tuple[Any, ...] = ()
    os: int | None = None  # the kernel's number of a Numa node or a Pu


@dataclass(frozen=True)
class Partition:
    """One level of sharing: disjoint blocks that together hold every usable CPU."""

    kind: str
    blocks: tuple[Block, ...]

    def refines(self, other: "Partition") -> bool:
        """Every block of this one lies inside a block of the other."""
        owner = {cpu: i for i, block in enumerate(other.blocks) for cpu in block.cpus}
        return all(len({owner[cpu] for cpu in block.cpus}) == 1 for block in self.blocks)


def partitions(machine: Machine, root: str | Path = "/") -> tuple[Partition, ...]:
    """All levels the machine shows, unordered; caches and clusters are read below root."""
    cpus = machine.allowed_cpus
    found = [
        Partition("Package", tuple(Block(p.cpus) for p in machine.packages)),
        Partition("Numa", _numa_blocks(machine)),
        Partition("Core", tuple(Block(core.cpus, _class_attrs(core.capacity)) for core in machine.cores)),
        Partition("Pu", tuple(Block((cpu,), os=cpu) for cpu in cpus)),
    ]
    found += _caches(machine, Path(root))
    found += _clusters(machine, Path(root))
    return tuple(found)


def _class_attrs(capacity: int) -> tuple[Any, ...]:
    return (("cls", capacity),) if capacity else ()


def _numa_blocks(machine: Machine) -> tuple[Block, ...]:
    """One block a domain; memory in GiB and, where distances are uneven, the sorted row tell nodes apart."""
    rows = [tuple(sorted(n.distances.values())) for n in machine.nodes if n.online_cpus]
    uneven = len(set(rows)) > 1 or any(len(set(row)) > 2 for row in rows)
    blocks = []
    for domain in machine.domains:
        cpus = tuple(sorted(cpu for core in domain.cores for cpu in core.cpus))
        attrs: tuple[Any, ...] = ()
        if domain.nodes:
            memory = sum(machine.node(n).memory_bytes for n in domain.nodes)
            attrs = (("mem", round(memory / (1 << 30))),)
            if uneven:
                attrs += (("distance", tuple(sorted(machine.node(domain.nodes[0]).distances.values()))),)
        blocks.append(Block(cpus, attrs, domain.nodes[0] if domain.nodes else None))
    return tuple(blocks)


def _caches(machine: Machine, root: Path) -> list[Partition]:
    """The last-level cache, and L2 where several cores share it."""
    levels: dict[int, dict[tuple[int, ...], int]] = {}  # level -> CPUs -> bytes
    for core in machine.cores:
        for index in sorted((root / CPU / f"cpu{core.cpus[0]}" / "cache").glob("index[0-9]*")):
            if read_text(index / "type") == "Instruction":
                continue
            shared = read_set(index, "shared_cpu_list", "shared_cpu_map") or core.cpus
            cpus = tuple(sorted(set(shared) & set(machine.allowed_cpus) | set(core.cpus)))
            levels.setdefault(int(read_text(index / "level") or 0), {})[cpus] = _bytes(
                read_text(index / "size")
            )
    kinds = {max(levels): "Llc"} if levels and max(levels) > 1 else {}
    if 2 in levels and 2 not in kinds:
        kinds[2] = "L2"
    found = []
    for level, kind in kinds.items():
        blocks = tuple(Block(cpus, ((f"l{level}", size),)) for cpus, size in levels[level].items())
        if _covers(blocks, machine) and (kind == "Llc" or len(blocks) < len(machine.cores)):
            found.append(Partition(kind, blocks))
    return found


def _bytes(text: str | None) -> int:
    if not text:
        return 0
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def _clusters(machine: Machine, root: Path) -> list[Partition]:
    """Kernel clusters of several cores. Some virtual machines show one cluster a core: no information."""
    found: dict[tuple[int, ...], None] = {}
    for core in machine.cores:
        topology = root / CPU / f"cpu{core.cpus[0]}" / "topology"
        shared = read_set(topology, "cluster_cpus_list", "cluster_cpus") or ()
        found[tuple(sorted(set(shared) & set(machine.allowed_cpus)))] = None
    blocks = tuple(Block(cpus) for cpus in found)
    useful = _covers(blocks, machine) and 1 < len(blocks) < len(machine.cores)
    return [Partition("Cluster", blocks)] if useful else []


def _covers(blocks: Iterable[Block], machine: Machine) -> bool:
    cpus = [cpu for block in blocks for cpu in block.cpus]
    return sorted(cpus) == list(machine.allowed_cpus)
