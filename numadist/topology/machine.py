"""What a machine is, as frozen data. No file is read here: see sysfs.py and synthetic.py."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from numadist.topology.cpuset import format_list


@dataclass(frozen=True)
class Core:
    """One physical core: those of its CPUs that are online and allowed, lowest first."""

    cpus: tuple[int, ...]
    package: int
    node: int | None  # None: the kernel lists this core in no node
    capacity: int = 0  # relative speed, comparable inside one machine only; 0: unknown


@dataclass(frozen=True)
class Node:
    """One online NUMA node, by the kernel's number. A node may have no CPU, no memory, or neither allowed."""

    id: int
    online_cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    memory_allowed: bool
    distances: dict[int, int] = field(default_factory=dict)  # node -> distance; empty: unknown

    @property
    def usable_memory(self) -> bool:
        return self.memory_allowed and self.memory_bytes > 0


@dataclass(frozen=True)
class Package:
    """One socket. id: the kernel's package id, or the rank by lowest CPU where those ids are unusable."""

    id: int
    cpus: tuple[int, ...]  # online and allowed


@dataclass(frozen=True)
class Domain:
    """CPUs that are equally near to the same memory: one node, or several that list the same CPUs."""

    nodes: tuple[int, ...]  # empty: CPUs the kernel lists in no node
    cores: tuple[Core, ...]


@dataclass(frozen=True)
class Machine:
    """The part of a machine this process may use, and enough of the rest to explain why.

    cores are in logical order: by package (its lowest CPU), then node, then lowest CPU.
    """

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    packages: tuple[Package, ...]
    present_cpus: tuple[int, ...]
    online_cpus: tuple[int, ...]
    allowed_cpus: tuple[int, ...]  # online and allowed
    allowed_mems: tuple[int, ...]
    has_numa: bool = True
    cpu_quota: float | None = None  # cores' worth of time the cgroup grants; None: no limit
    notes: tuple[str, ...] = ()

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Domains with at least one usable CPU, in the order of their first core."""
        return domains_of(self, self.cores)

    def node(self, node_id: int) -> Node:
        return next(n for n in self.nodes if n.id == node_id)

    def memory_of(self, domain_nodes: Iterable[int]) -> tuple[int, ...]:
        """Those of the nodes that have memory this process may use."""
        return tuple(n for n in sorted(domain_nodes) if self.node(n).usable_memory)

    def nearest_memory(self, node_id: int) -> tuple[int, int] | None:
        """(node, distance) of the nearest usable memory, the lowest number of equals; None: unknown."""
        distances = self.node(node_id).distances
        found = [(distances[n.id], n.id) for n in self.nodes if n.usable_memory and n.id in distances]
        return (min(found)[1], min(found)[0]) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. CPU sets are kernel lists; bytes are integers."""
        return {
            "packages": [{"id": p.id, "cpus": format_list(p.cpus)} for p in self.packages],
            "numa_nodes": [
                {
                    "id": n.id,
                    "online_cpus": format_list(n.online_cpus),
                    "memory_bytes": n.memory_bytes,
                    "free_bytes": n.free_bytes,
                    "memory_allowed": n.memory_allowed,
                    "distances": {str(k): v for k, v in n.distances.items()},
                }
                for n in self.nodes
            ],
            "cores": [list(c.cpus) for c in self.cores],
            "present_cpus": format_list(self.present_cpus),
            "online_cpus": format_list(self.online_cpus),
            "allowed_cpus": format_list(self.allowed_cpus),
            "allowed_mems": format_list(self.allowed_mems),
            "has_numa": self.has_numa,
            "cpu_quota": self.cpu_quota,
            "notes": list(self.notes),
        }


def domains_of(machine: Machine, cores: Iterable[Core]) -> tuple[Domain, ...]:
    """Group cores by node. Nodes that list the same CPUs (numa=fake, HBM in flat mode) are one domain."""
    twins: dict[tuple[int, ...], list[int]] = {}
    for node in machine.nodes:
        twins.setdefault(node.online_cpus, []).append(node.id)
    members = {n: tuple(group) for cpus, group in twins.items() if cpus for n in group}
    grouped: dict[tuple[int, ...], list[Core]] = {}
    for core in cores:
        grouped.setdefault(members.get(core.node, ()) if core.node is not None else (), []).append(core)
    return tuple(Domain(nodes, tuple(group)) for nodes, group in grouped.items())


def logical_order(cores: Iterable[Core]) -> tuple[Core, ...]:
    """Cores by package (its lowest CPU), then node, then lowest CPU: neighbours share most."""
    cores = list(cores)
    first_cpu: dict[int, int] = {}
    for core in cores:
        first_cpu[core.package] = min(first_cpu.get(core.package, core.cpus[0]), core.cpus[0])
    # A core in no node comes after the nodes of its package.
    return tuple(
        sorted(cores, key=lambda c: (first_cpu[c.package], c.node is None, c.node or 0, c.cpus[0])),
    )
