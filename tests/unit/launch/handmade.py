"""Machines nobody recorded, written as /sys trees: what a reader sees is files, so a test writes files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from numadist.topology.cpuset import format_list

GIB_KB = 1 << 20


def write_machine(
    root: Path,
    cores: Sequence[Sequence[int]],
    packages: Sequence[Sequence[int]],
    nodes: Mapping[int, Sequence[int]],
    memory_gib: Mapping[int, float] | None = None,
    online: Sequence[int] | None = None,
    distances: Mapping[int, Sequence[int]] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write sys/ below root. cores and packages: their CPUs; nodes: CPUs of each, none for memory alone."""
    cpus = sorted(cpu for core in cores for cpu in core)
    texts = {"sys/devices/system/cpu/online": format_list(cpus if online is None else online)}
    for core in cores:
        for cpu in core:
            folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
            package = next(i for i, members in enumerate(packages) if cpu in members)
            texts[f"{folder}/thread_siblings_list"] = format_list(core)
            texts[f"{folder}/core_siblings_list"] = format_list(packages[package])
            texts[f"{folder}/physical_package_id"] = str(package)
    for node, members in nodes.items():
        folder = f"sys/devices/system/node/node{node}"
        gib = 16 if memory_gib is None else memory_gib.get(node, 0)
        row = [10 if other == node else 20 for other in sorted(nodes)]
        texts[f"{folder}/cpulist"] = format_list(members)
        texts[f"{folder}/meminfo"] = (
            f"Node {node} MemTotal: {int(gib * GIB_KB)} kB\nNode {node} MemFree: 0 kB"
        )
        texts[f"{folder}/distance"] = " ".join(map(str, distances[node] if distances else row))
    if nodes:
        texts["sys/devices/system/node/online"] = format_list(nodes)
    for name, text in {**texts, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root
