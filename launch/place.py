"""Which CPUs and which memory each rank gets: a pure function of the machine and the request."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from numadist.errors import PlacementError
from numadist.topology.cpuset import format_list
from numadist.topology.machine import Core, Domain, Machine, domains_of

T = TypeVar("T")


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank runs. mem_nodes are what the policy names, numa_nodes those its CPUs belong to."""

    rank: int
    cpus: tuple[int, ...]
    mem_nodes: tuple[int, ...]
    mem_policy: str
    threads: int
    package: int
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """What the user asked for. per: `numa`, `socket` or `node` (a torchrun node is this whole machine)."""

    per: str = "numa"
    count: int = 1
    cpus: tuple[tuple[int, ...], ...] | None = None  # explicit list a rank; replaces per and count
    numa_nodes: tuple[int, ...] | None = None
    sockets: tuple[int, ...] | None = None
    reserve: int = 0
    smt: bool = False
    perf_cores_only: bool = False
    mem: str = "bind"
    strict: bool = False
    omp_threads: int | None = None  # None: the cores of each rank

    @property
    def option(self) -> str:
        return f"--nproc-per-{self.per}"


@dataclass(frozen=True)
class Placement:
    """Ranks in rank order, and what the user loses by it, one sentence each."""

    ranks: tuple[RankPlacement, ...]
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self, machine: Machine) -> dict[str, Any]:
        """The JSON of `numarun --dry-run --json`."""
        ranks = [
            {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(r).items()} for r in self.ranks
        ]
        return {"ranks": ranks, "warnings": list(self.warnings), "machine": machine.to_dict()}


def place(machine: Machine, request: Request) -> Placement:
    """Where all ranks of this machine run. Raises: PlacementError, the message naming the option at fault."""
    warnings: list[str] = []
    if request.cpus is not None:
        groups = [_literal(machine, request.cpus, cpus) for cpus in request.cpus]
    else:
        cores = _selected(machine, request)
        groups = _groups(machine, request, cores, warnings)
        groups = [_without_reserve(request, rank, group) for rank, group in enumerate(groups)]
    ranks = tuple(
        _rank(machine, request, rank, cores, cpus, warnings) for rank, (cores, cpus) in enumerate(groups)
    )
    ranks = _within_quota(machine, request, ranks, warnings)
    return Placement(ranks, tuple(dict.fromkeys(warnings)))


Group = tuple[tuple[Core, ...], tuple[int, ...]]  # cores of a rank, and its CPUs among theirs


def _selected(machine: Machine, request: Request) -> tuple[Core, ...]:
    """The cores that --numa-nodes, --sockets and --cores leave."""
    cores = machine.cores
    if request.numa_nodes is not None:
        for node in request.numa_nodes:
            _check_node(machine, node)
        cores = tuple(c for c in cores if c.node in request.numa_nodes)
    if request.sockets is not None:
        known = [p.id for p in machine.packages]
        for socket in request.sockets:
            if socket not in known:
                raise PlacementError(f"--sockets {socket}: no such socket; sockets are {format_list(known)}")
        cores = tuple(c for c in cores if c.package in request.sockets)
    if request.perf_cores_only:
        best = max((c.capacity for c in cores), default=0)
        if best == min((c.capacity for c in cores), default=0):
            raise PlacementError("--cores perf: the kernel knows no faster and slower cores on this machine")
        cores = tuple(c for c in cores if c.capacity == best)
    if not cores:
        raise PlacementError("--numa-nodes and --sockets leave no core: no core is on both")
    return cores


def _check_node(machine: Machine, node_id: int) -> None:
    if node_id not in {n.id for n in machine.nodes}:
        online = format_list(n.id for n in machine.nodes)
        raise PlacementError(f"--numa-nodes {node_id}: no such NUMA node; online nodes are {online}")
    node = machine.node(node_id)
    if not node.online_cpus:
        having = format_list(n.id for n in machine.nodes if n.online_cpus)
        what = "memory but no CPUs" if node.memory_bytes else "no CPUs"
        raise PlacementError(f"--numa-nodes {node_id}: node has {what}; nodes with CPUs are {having}")
    if not set(node.online_cpus) & set(machine.allowed_cpus):
        raise PlacementError(
            f"--numa-nodes {node_id}: none of its CPUs {format_list(node.online_cpus)} is allowed here "
            f"(allowed: {format_list(machine.allowed_cpus)}, from the process's cpuset/affinity)"
        )


def _groups(machine: Machine, request: Request, cores: tuple[Core, ...], warnings: list[str]) -> list[Group]:
    domains = domains_of(machine, cores)
    if request.per == "numa":
        homeless = [cpu for d in domains if not d.nodes for core in d.cores for cpu in core.cpus]
        if homeless:
            warnings.append(
                f"CPUs {format_list(homeless)} are in no online NUMA node and get no rank; "
                "use --nproc-per-socket or --cpus to use them"
            )
        groups = [
            group
            for d in domains
            if d.nodes
            for group in _split((d,), request, f"NUMA node {format_list(d.nodes)}", warnings)
        ]
        if not groups:
            raise PlacementError("no NUMA node has a usable CPU; use --nproc-per-node or --cpus")
        return groups
    if request.per == "node":
        return _split(domains, request, "this machine", warnings)
    groups = []
    for package in dict.fromkeys(c.package for c in cores):
        own = domains_of(machine, [c for c in cores if c.package == package])
        groups += _split(own, request, f"socket {package}", warnings)
    return groups


def _split(domains: Sequence[Domain], request: Request, where: str, warnings: list[str]) -> list[Group]:
    """count groups of cores: cut inside domains, or joining whole ones, else across with a warning."""
    count, num_domains = request.count, len(domains)
    cores = [core for d in domains for core in d.cores]
    if num_domains % count == 0:
        step = num_domains // count
        joined = [domains[i : i + step] for i in range(0, num_domains, step)]
        return [_whole([core for d in group for core in d.cores], request) for group in joined]
    _check_room(cores, request, where)
    share, rest = divmod(count, num_domains)
    if rest == 0 and all(_room(d.cores, request) >= share for d in domains):
        return [piece for d in domains for piece in _cut(d.cores, share, request)]
    warnings.append(
        f"{request.option} {count} on {where} with {num_domains} NUMA nodes: some ranks cross a node; "
        f"a multiple or a divisor of {num_domains} keeps each rank on whole nodes"
    )
    return _cut(cores, count, request)


def _room(cores: Sequence[Core], request: Request) -> int:
    """Ranks these cores can hold: one a core, with --smt one a thread."""
    return sum(len(core.cpus) for core in cores) if request.smt else len(cores)


def _check_room(cores: Sequence[Core], request: Request, where: str) -> None:
    have, count = _room(cores, request), request.count
    if count > have:
        unit = "threads" if request.smt else "cores"
        more = not request.smt and sum(len(core.cpus) for core in cores) >= count
        hint = " (use --smt to count threads)" if more else ""
        raise PlacementError(
            f"{request.option} {count} needs {count} {unit} on {where}, which has {have} allowed {unit}{hint}"
        )


def _whole(cores: Sequence[Core], request: Request) -> Group:
    cpus = [cpu for core in cores for cpu in (core.cpus if request.smt else core.cpus[:1])]
    return tuple(cores), tuple(sorted(cpus))


def _cut(cores: Sequence[Core], count: int, request: Request) -> list[Group]:
    """count pieces of neighbouring cores; the remainder goes one each to the first."""
    if count <= len(cores):
        return [_whole(piece, request) for piece in _chunks(cores, count)]
    threads = [(core, cpu) for core in cores for cpu in core.cpus]
    return [
        (tuple(dict.fromkeys(core for core, _ in piece)), tuple(sorted(cpu for _, cpu in piece)))
        for piece in _chunks(threads, count)
    ]


def _chunks(items: Sequence[T], count: int) -> list[Sequence[T]]:
    size, rest = divmod(len(items), count)
    starts = [i * size + min(i, rest) for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(starts)]


def _without_reserve(request: Request, rank: int, group: Group) -> Group:
    cores, _ = group
    if not request.reserve:
        return group
    if request.reserve >= len(cores):
        raise PlacementError(f"--reserve {request.reserve} leaves rank {rank} no core of its {len(cores)}")
    return _whole(cores[: -request.reserve], request)


def _literal(machine: Machine, lists: Sequence[tuple[int, ...]], cpus: tuple[int, ...]) -> Group:
    """Cores of a --cpus list, after checking each CPU of it."""
    for cpu in cpus:
        if cpu not in machine.present_cpus:
            raise PlacementError(f"--cpus: CPU {cpu} does not exist")
        if cpu not in machine.online_cpus:
            raise PlacementError(f"--cpus: CPU {cpu} is offline")
        if cpu not in machine.allowed_cpus:
            raise PlacementError(
                f"--cpus: CPU {cpu} is not in the allowed set {format_list(machine.allowed_cpus)}"
            )
        owners = [rank for rank, other in enumerate(lists) if cpu in other]
        if len(owners) > 1:
            raise PlacementError(f"--cpus: CPU {cpu} is given to ranks {owners[0]} and {owners[1]}")
    return tuple(c for c in machine.cores if set(c.cpus) & set(cpus)), cpus


def _rank(
    machine: Machine,
    request: Request,
    rank: int,
    cores: tuple[Core, ...],
    cpus: tuple[int, ...],
    warnings: list[str],
) -> RankPlacement:
    domains = domains_of(machine, cores)
    return RankPlacement(
        rank=rank,
        cpus=cpus,
        mem_nodes=_memory(machine, request, rank, domains, warnings),
        mem_policy=request.mem if machine.has_numa else "none",
        threads=request.omp_threads or (len(cpus) if request.smt else len(cores)),
        package=cores[0].package,
        numa_nodes=tuple(sorted({n for d in domains for n in d.nodes})),
    )


def _memory(
    machine: Machine, request: Request, rank: int, domains: Iterable[Domain], warnings: list[str]
) -> tuple[int, ...]:
    """The rank's own nodes with usable memory, else the nearest one with a warning."""
    own = sorted({n for d in domains for n in d.nodes})
    usable = machine.memory_of(own)
    if request.mem == "none" or not machine.has_numa:
        return usable or tuple(own)
    if request.strict:
        _check_memory_allowed(machine, rank, own)
    if usable:
        return usable
    anywhere = tuple(n.id for n in machine.nodes if n.usable_memory)
    if not anywhere:
        raise PlacementError(
            f"rank {rank}: no memory node is usable; allowed memory nodes are "
            f"{format_list(machine.allowed_mems) or 'none'}; use --mem none"
        )
    for node in own:
        found = machine.nearest_memory(node)
        if found:
            warnings.append(
                f"rank {rank}: node {node} has no usable memory: "
                f"bound to nearest node {found[0]} (distance {found[1]})"
            )
            return (found[0],)
    warnings.append(
        f"rank {rank}: its CPUs have no usable memory of their own and no known distance; "
        f"memory is taken from {format_list(anywhere)}"
    )
    return anywhere


def _check_memory_allowed(machine: Machine, rank: int, own: Iterable[int]) -> None:
    for node in own:
        if machine.node(node).memory_bytes and not machine.node(node).memory_allowed:
            allowed = format_list(machine.allowed_mems)
            wanted = ",".join(map(str, sorted({*machine.allowed_mems, node})))
            raise PlacementError(
                f"rank {rank}: memory node {node} is not in Mems_allowed {allowed} (cpuset.mems); "
                f"start the container with --cpuset-mems={wanted} or use --mem none"
            )


def _within_quota(
    machine: Machine, request: Request, ranks: tuple[RankPlacement, ...], warnings: list[str]
) -> tuple[RankPlacement, ...]:
    """Ranks with threads cut so that all together fit the cgroup's CPU quota, at least one each."""
    quota, total = machine.cpu_quota, sum(r.threads for r in ranks)
    if quota is None or total <= quota or request.omp_threads is not None:
        return ranks
    shares = [max(1, len(share)) for share in _chunks(range(int(quota)), len(ranks))]
    cut = tuple(replace(r, threads=min(r.threads, share)) for r, share in zip(ranks, shares, strict=True))
    now = sum(r.threads for r in cut)
    what = f"using {now} (--omp-threads to override)" if now < total else ""
    if now > quota:
        what = (
            f"{what}; " if what else ""
        ) + f"{len(ranks)} ranks need one each, so the kernel will throttle them"
    warnings.append(f"cgroup CPU quota is {quota:.1f} cores but ranks would run {total} threads; {what}")
    return cut
