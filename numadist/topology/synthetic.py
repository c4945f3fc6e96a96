"""Machines we do not have, from one line: `synthetic("package:2 node:2 core:8 cpu:2")`."""

from collections.abc import Iterable

from numadist.errors import TopologyError
from numadist.topology.machine import Core, Machine, Node, Package

LEVELS = ("package", "node", "core", "cpu")
NODE_BYTES = 64 << 30
NEAR, SAME_PACKAGE, FAR = 10, 12, 21


def synthetic(text: str) -> Machine:
    """A regular machine: `package:P node:N core:C cpu:T`, each count inside one unit of the level before.

    Missing levels count 1. CPU numbers are as Linux gives them on Intel: first threads of all cores, then
    second threads. Each node has 64 GiB, all free. Raises: TopologyError.
    """
    counts = dict.fromkeys(LEVELS, 1)
    for word in text.split():
        level, _, count = word.partition(":")
        if level not in counts or not count.isdecimal() or int(count) < 1:
            raise TopologyError(
                f"{word!r} is not LEVEL:COUNT with a level of {', '.join(LEVELS)}, COUNT >= 1"
            )
        counts[level] = int(count)
    num_nodes = counts["package"] * counts["node"]
    num_cores = num_nodes * counts["core"]
    cores = tuple(
        Core(
            cpus=tuple(core + thread * num_cores for thread in range(counts["cpu"])),
            package=core // (counts["core"] * counts["node"]),
            node=core // counts["core"],
        )
        for core in range(num_cores)
    )
    all_cpus = tuple(range(num_cores * counts["cpu"]))
    return Machine(
        cores=cores,
        nodes=tuple(_node(n, cores, num_nodes, counts["node"]) for n in range(num_nodes)),
        packages=tuple(
            Package(p, _cpus(c for c in cores if c.package == p)) for p in range(counts["package"])
        ),
        present_cpus=all_cpus,
        online_cpus=all_cpus,
        allowed_cpus=all_cpus,
        allowed_mems=tuple(range(num_nodes)),
    )


def _cpus(cores: Iterable[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def _node(node: int, cores: tuple[Core, ...], num_nodes: int, nodes_per_package: int) -> Node:
    def distance(other: int) -> int:
        if other == node:
            return NEAR
        return SAME_PACKAGE if other // nodes_per_package == node // nodes_per_package else FAR

    return Node(
        id=node,
        online_cpus=_cpus(c for c in cores if c.node == node),
        memory_bytes=NODE_BYTES,
        free_bytes=NODE_BYTES,
        memory_allowed=True,
        distances={other: distance(other) for other in range(num_nodes)},
    )
