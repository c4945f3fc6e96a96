"""A Machine as text for people."""

from numadist.topology.cpuset import format_list
from numadist.topology.machine import Machine


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def gib(num_bytes: int) -> str:
    """Bytes as GiB: whole above 10 GiB, else one digit."""
    value = num_bytes / (1 << 30)
    return f"{value:.0f} GiB" if value >= 10 else f"{value:.1f} GiB"


def short_list(numbers: tuple[int, ...]) -> str:
    """A kernel list; one with many pieces is cut in the middle: `0,4,8,...,36`."""
    pieces = format_list(numbers).split(",")
    return ",".join(pieces if len(pieces) <= 6 else [*pieces[:3], "...", pieces[-1]])


def summary(machine: Machine) -> str:
    """One line: sockets, nodes, cores, threads and how many CPUs are allowed. Sockets and cores are those allowed."""
    threads = sum(len(core.cpus) for core in machine.cores)
    homed = _homed(machine)
    forbidden = sum(1 for node in machine.nodes if node.online_cpus and node.id not in homed)
    nodes = plural(len(machine.nodes), "NUMA node")
    if forbidden:
        nodes = f"{len(machine.nodes) - forbidden} of {nodes}"
    return (
        f"{plural(len(machine.packages), 'socket')}, {nodes}, "
        f"{plural(len(machine.cores), 'core')} ({plural(threads, 'thread')}), "
        f"allowed {plural(len(machine.allowed_cpus), 'CPU')}"
    )


def _homed(machine: Machine) -> set[int]:
    """Nodes with CPUs that this process may use."""
    return {node for domain in machine.domains for node in domain.nodes}


def render(machine: Machine) -> str:
    """Several lines: packages with their nodes, CPU-less nodes, distances, what is allowed, notes."""
    lines = [summary(machine)]
    for package in machine.packages:
        lines.append(f"socket {package.id}: cpus {short_list(package.cpus)}")
        for domain in machine.domains:
            cpus = tuple(c for core in domain.cores if core.package == package.id for c in core.cpus)
            if cpus:
                lines.append(
                    f"  {_domain_name(domain.nodes)}: cpus {short_list(cpus)}{_memory(machine, domain.nodes)}"
                )
    homed = _homed(machine)
    for node in machine.nodes:
        if node.id not in homed:
            reason = "no allowed CPU" if node.online_cpus else "no CPU"
            lines.append(f"node {node.id}: {reason}, gets no rank{_memory(machine, (node.id,))}")
    lines += _distance_table(machine)
    if machine.allowed_cpus != machine.online_cpus:
        allowed, online = format_list(machine.allowed_cpus), format_list(machine.online_cpus)
        lines.append(f"allowed cpus {allowed} of online {online}")
    if machine.cpu_quota is not None:
        lines.append(f"cgroup CPU quota: {machine.cpu_quota:.1f} cores")
    lines += [f"note: {note}" for note in machine.notes]
    return "\n".join(lines)


def _domain_name(nodes: tuple[int, ...]) -> str:
    if not nodes:
        return "in no node"
    return f"{'node' if len(nodes) == 1 else 'nodes'} {format_list(nodes)}"


def _memory(machine: Machine, nodes: tuple[int, ...]) -> str:
    if not nodes:
        return ""
    found = [machine.node(n) for n in nodes]
    text = f", memory {gib(sum(n.memory_bytes for n in found))}, free {gib(sum(n.free_bytes for n in found))}"
    return text if all(n.memory_allowed for n in found) else f"{text} (not allowed here)"


def _distance_table(machine: Machine) -> list[str]:
    rows = [n for n in machine.nodes if n.distances]
    if len(rows) < 2:
        return []
    width = max(4, *(len(str(n.id)) + 1 for n in machine.nodes))
    header = "distance" + "".join(f"{n.id:>{width}}" for n in machine.nodes)
    return [header] + [
        f"{row.id:>8}" + "".join(f"{row.distances.get(n.id, '-'):>{width}}" for n in machine.nodes)
        for row in rows
    ]
