"""Read a Machine from /sys and /proc, or from a recorded copy of them below another root.

Real machines lack files, list offline CPUs, repeat package ids or use -1 for them; what is trusted is
the sibling lists and the online masks. One CPU per core is read, so 256 CPUs cost a few milliseconds.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from numadist.errors import TopologyError
from numadist.topology.cpuset import format_list, parse_list, parse_map
from numadist.topology.machine import Core, Machine, Node, Package, logical_order

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
T = TypeVar("T")


def read_machine(
    root: str | Path = "/",
    allowed_cpus: Iterable[int] | None = None,
    allowed_mems: Iterable[int] | None = None,
) -> Machine:
    """The machine below root, restricted to the allowed sets.

    Default sets: what this process may use on the live machine; everything online on a recorded one.
    Raises: TopologyError when there is no sys/devices/system/cpu, or no CPU is left.
    """
    root = Path(root)
    live = root.resolve() == Path("/")
    if not (root / CPU).is_dir():
        raise TopologyError(f"no {CPU} below {root}; --sysfs wants a directory that holds sys/ and proc/")
    present = _present(root / CPU, "cpu")
    online = _online_cpus(root, present)
    if allowed_cpus is None:
        allowed_cpus = os.sched_getaffinity(0) if live else online
    usable = sorted(set(online) & set(allowed_cpus))
    if not usable:
        raise TopologyError(
            f"no usable CPU: online {format_list(online) or 'none'}, "
            f"allowed {format_list(allowed_cpus) or 'none'} (cpuset or affinity of this process)"
        )
    node_ids = _online_nodes(root)
    if allowed_mems is None:
        allowed_mems = (_live_mems() if live else None) or node_ids or (0,)
    nodes, notes = _read_nodes(root, node_ids, set(online), set(allowed_mems))
    cores, packages = _read_cores(root, usable, nodes)
    return Machine(
        cores=cores,
        nodes=nodes,
        packages=packages,
        present_cpus=present,
        online_cpus=online,
        allowed_cpus=tuple(usable),
        allowed_mems=tuple(sorted(allowed_mems)),
        has_numa=bool(node_ids),
        cpu_quota=_cpu_quota(root),
        notes=tuple(notes),
    )


def read_text(path: Path) -> str | None:
    """The stripped text of a file; None when the kernel does not offer it."""
    try:
        return path.read_text(errors="replace").strip("\0 \t\r\n")
    except OSError:
        return None


def read_set(path: Path, list_name: str, map_name: str) -> tuple[int, ...] | None:
    """A CPU set from its list file, else from its bit map (old kernels write only the map)."""
    text = read_text(path / list_name)
    if text is not None:
        return _parsed(path / list_name, text, parse_list)
    text = read_text(path / map_name)
    return None if text is None else _parsed(path / map_name, text, parse_map)


def _parsed(path: Path, text: str, parse: Callable[[str], T]) -> T:
    """Raises: TopologyError that names the file."""
    try:
        return parse(text)
    except (TopologyError, ValueError) as error:
        raise TopologyError(f"{path}: {error}") from None


def _present(folder: Path, prefix: str) -> tuple[int, ...]:
    if not folder.is_dir():
        return ()
    found = (re.fullmatch(rf"{prefix}(\d+)", name) for name in os.listdir(folder))
    return tuple(sorted(int(match[1]) for match in found if match))


def _online_cpus(root: Path, present: tuple[int, ...]) -> tuple[int, ...]:
    text = read_text(root / CPU / "online")
    if text is not None:
        online = _parsed(root / CPU / "online", text, parse_list)
        return tuple(c for c in online if c in set(present))
    # No mask: a CPU is offline if its own file says so. CPU 0 often has no such file and is online.
    return tuple(c for c in present if read_text(root / CPU / f"cpu{c}" / "online") != "0")


def _online_nodes(root: Path) -> tuple[int, ...]:
    present = _present(root / NODE, "node")
    text = read_text(root / NODE / "online")
    if text is None:
        return present
    return tuple(n for n in _parsed(root / NODE / "online", text, parse_list) if n in set(present))


def _live_mems() -> tuple[int, ...] | None:
    match = re.search(r"^Mems_allowed_list:\s*(\S+)", read_text(Path("/proc/self/status")) or "", re.M)
    return parse_list(match[1]) if match else None


def _read_nodes(
    root: Path, node_ids: tuple[int, ...], online: set[int], allowed_mems: set[int]
) -> tuple[tuple[Node, ...], list[str]]:
    if not node_ids:
        total, free = _meminfo(root / "proc/meminfo")
        node = Node(0, tuple(sorted(online)), total, free, memory_allowed=True)
        return (node,), ["this kernel shows no NUMA nodes; treating the machine as one node"]
    nodes, notes = [], []
    for node_id in node_ids:
        folder = root / NODE / f"node{node_id}"
        cpus = read_set(folder, "cpulist", "cpumap") or ()
        total, free = node_memory(folder)
        distances = _distances(root, folder, node_ids)
        if distances is None:
            notes.append(f"node {node_id}: its distance file does not match the online nodes; not used")
        nodes.append(
            Node(
                id=node_id,
                online_cpus=tuple(c for c in cpus if c in online),
                memory_bytes=total,
                free_bytes=free,
                memory_allowed=node_id in allowed_mems,
                distances=distances or {},
            )
        )
    return tuple(nodes), notes


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _distances(root: Path, folder: Path, node_ids: tuple[int, ...]) -> dict[int, int] | None:
    """Node -> distance. One column belongs to each online node, in order of number."""
    row = _parsed(folder / "distance", read_text(folder / "distance") or "", _numbers)
    columns = node_ids
    if len(row) != len(columns):
        columns = _parsed(root / NODE / "possible", read_text(root / NODE / "possible") or "", parse_list)
    if len(row) != len(columns):
        return None if row else {}
    return {n: d for n, d in zip(columns, row, strict=True) if n in node_ids}


def node_memory(folder: Path) -> tuple[int, int]:
    """(total, free) bytes of a node directory now."""
    return _meminfo(folder / "meminfo")


def _meminfo(path: Path) -> tuple[int, int]:
    """(total, free) bytes; zeros where the file is missing."""
    text = read_text(path) or ""
    values = {}
    for name in ("MemTotal", "MemFree"):
        match = re.search(rf"{name}:\s*(\d+) kB", text)
        values[name] = int(match[1]) * 1024 if match else 0
    return values["MemTotal"], values["MemFree"]


def _read_cores(
    root: Path, usable: list[int], nodes: tuple[Node, ...]
) -> tuple[tuple[Core, ...], tuple[Package, ...]]:
    node_of: dict[int, int] = {}
    for node in nodes:
        for cpu in node.online_cpus:
            node_of.setdefault(cpu, node.id)
    allowed = set(usable)
    seen: set[int] = set()
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # cpus of the core, of its package, id
    for cpu in usable:
        if cpu in seen:
            continue
        topology = root / CPU / f"cpu{cpu}" / "topology"
        siblings = (
            read_set(topology, "core_cpus_list", "core_cpus")
            or read_set(topology, "thread_siblings_list", "thread_siblings")
            or (cpu,)
        )
        # Offline siblings are listed on some kernels; a CPU is always its own sibling.
        core_cpus = tuple(sorted((set(siblings) & allowed) | {cpu}))
        seen.update(core_cpus)
        package_cpus = (
            read_set(topology, "package_cpus_list", "package_cpus")
            or read_set(topology, "core_siblings_list", "core_siblings")
            or tuple(usable)
        )
        package = topology / "physical_package_id"
        package_id = _parsed(package, read_text(package) or "-1", int)
        found.append((core_cpus, package_cpus, package_id))
    ids = _package_ids([(cpus, package_id) for _, cpus, package_id in found])
    capacities = _capacities(root, [cpus[0] for cpus, *_ in found])
    cores = logical_order(
        Core(cpus, ids[package_cpus], node_of.get(cpus[0]), capacities[cpus[0]])
        for cpus, package_cpus, _ in found
    )
    members: dict[int, list[int]] = {}
    for core in cores:
        members.setdefault(core.package, []).extend(core.cpus)
    return cores, tuple(Package(p, tuple(sorted(cpus))) for p, cpus in members.items())


def _package_ids(seen: list[tuple[tuple[int, ...], int]]) -> dict[tuple[int, ...], int]:
    """Sibling list -> number. The kernel's id only where each list has its own id and none is negative."""
    by_list = dict(seen)
    ids = list(by_list.values())
    if min(ids) >= 0 and len(set(ids)) == len(ids):
        return by_list
    return {cpus: index for index, cpus in enumerate(sorted(by_list))}


def _capacities(root: Path, cpus: list[int]) -> dict[int, int]:
    """Relative speed of CPUs: Intel's list of slow cores, the kernel's cpu_capacity (ARM), the base clock, else 0."""
    atoms = root / "sys/devices/cpu_atom/cpus"
    listed = read_text(atoms)
    if listed is not None:
        slow = set(_parsed(atoms, listed, parse_list))
        return {c: 1 if c in slow else 2 for c in cpus}
    for name in ("cpu_capacity", "cpufreq/base_frequency"):
        paths = {c: root / CPU / f"cpu{c}" / name for c in cpus}
        if read_text(paths[cpus[0]]) is not None:
            found = {c: _parsed(path, read_text(path) or "0", int) for c, path in paths.items()}
            # One clock for all says nothing that machines without the file do not say.
            return found if name == "cpu_capacity" or len(set(found.values())) > 1 else dict.fromkeys(cpus, 0)
    return dict.fromkeys(cpus, 0)


def _cpu_quota(root: Path) -> float | None:
    """Cores' worth of CPU time the cgroup grants (v2 cpu.max, v1 cfs quota), the smallest up the tree."""
    groups = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path.strip("/")))
    quotas = []
    for base, path in (("", groups.get("", "")), ("cpu", groups.get("cpu", ""))):
        folder = root / "sys/fs/cgroup" / base
        for level in [folder / path, *(folder / path).parents]:
            if not level.is_relative_to(folder):
                break
            quotas.append(_quota_of(level))
    found = [q for q in quotas if q is not None]
    return min(found) if found else None


def _quota_of(group: Path) -> float | None:
    words = (read_text(group / "cpu.max") or "").split()
    if not words:
        words = [read_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if not all(word.isdecimal() for word in words):
        return None
    quota_us, period_us = (int(word) for word in words)
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None
