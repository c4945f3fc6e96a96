"""TopoTree: a machine as a levelled tree, its transforms, and the service configurations it offers.

Leaves are hardware threads, inner nodes the resources they share. `group` and `remove` make the trees of
smaller or finer services; `tree_key` is equal for trees that differ only in which identical core is left out.
Idea of tree, group and remove: arXiv 2507.18454; exact semantics and keys are ours.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from numadist.errors import TopologyError
from numadist.topology.cpuset import format_list
from numadist.topology.machine import Machine
from numadist.topology.sharing import Block, Partition, partitions

# Coarse to fine, for blocks of equal size.
KINDS = ("Machine", "Package", "Numa", "Llc", "Cluster", "L2", "Core", "Pu")
# The levels every tree is built on; a cache or package that cuts across one of them is dropped.
BACKBONE = ("Numa", "Core", "Pu")
GROUP = "Group"


@dataclass(frozen=True)
class TopoNode:
    """kind and attrs are its identity; os (the kernel's number of a Numa node or Pu) is not."""

    kind: str
    attrs: tuple[Any, ...] = ()
    children: tuple["TopoNode", ...] = ()
    os: int | None = None

    @property
    def cpus(self) -> tuple[int, ...]:
        """Leaves below, left to right."""
        if not self.children:
            return () if self.os is None else (self.os,)
        return tuple(cpu for child in self.children for cpu in child.cpus)


@dataclass(frozen=True)
class TopoTree:
    """root at depth 0; all leaves have the same depth, and all nodes of a depth the same kind."""

    root: TopoNode
    notes: tuple[str, ...] = ()

    def level(self, depth: int) -> tuple[TopoNode, ...]:
        """Nodes of a depth, left to right."""
        nodes: tuple[TopoNode, ...] = (self.root,)
        for _ in range(depth):
            nodes = tuple(child for node in nodes for child in node.children)
        return nodes

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each depth."""
        found, node = [self.root.kind], self.root
        while node.children:
            node = node.children[0]
            found.append(node.kind)
        return tuple(found)

    @property
    def regular(self) -> bool:
        """All nodes of a depth have equally many children. Only regular trees offer group and remove."""
        return all(len({len(node.children) for node in self.level(d)}) == 1 for d in range(len(self.kinds)))

    def validate(self) -> None:
        """Raise TopologyError unless each CPU is one leaf, siblings are sorted and levels are of one kind."""
        cpus = self.root.cpus
        if len(set(cpus)) != len(cpus):
            raise TopologyError(f"a CPU appears in two leaves: {cpus}")
        for depth, kind in enumerate(self.kinds):
            nodes = self.level(depth)
            if {node.kind for node in nodes} != {kind}:
                raise TopologyError(f"depth {depth} mixes kinds {sorted({node.kind for node in nodes})}")
            for node in nodes:
                if bool(node.children) != (depth < len(self.kinds) - 1):
                    raise TopologyError(f"a {node.kind} at depth {depth} ends the tree early")
                firsts = [min(child.cpus) for child in node.children]
                if firsts != sorted(firsts):
                    raise TopologyError(
                        f"children of a {node.kind} are not sorted by their lowest CPU: {firsts}"
                    )


def build_tree(machine: Machine, root: str | Path = "/") -> TopoTree:
    """The tree of the usable CPUs; caches and clusters are read below root.

    A level that adds nothing is merged into the one above (`Package+Numa+Llc` on a plain socket).
    """
    levels, notes = _ordered(partitions(machine, root))
    whole = Partition("Machine", (Block(machine.allowed_cpus),))
    return TopoTree(_node(whole.blocks[0], "Machine", _merged([whole, *levels])[1:]), notes)


def _ordered(found: Iterable[Partition]) -> tuple[list[Partition], tuple[str, ...]]:
    """Levels from coarse to fine by inclusion, without those that cut across a more trusted one."""
    trusted = sorted(found, key=lambda p: (p.kind not in BACKBONE, KINDS.index(p.kind)))
    kept: list[Partition] = []
    notes = []
    for level in trusted:
        across = [other.kind for other in kept if not (level.refines(other) or other.refines(level))]
        if across:
            notes.append(f"{level.kind} cuts across {across[0]} and is left out of the tree")
        else:
            kept.append(level)
    return sorted(kept, key=lambda p: (len(p.blocks), KINDS.index(p.kind))), tuple(notes)


def _merged(levels: list[Partition]) -> list[Partition]:
    """Join neighbouring levels with the same blocks; the kinds are joined with `+`, Machine stays itself."""
    result = levels[:1]
    for level in levels[1:]:
        above = result[-1]
        if len(level.blocks) != len(above.blocks) or above.kind == "Machine":
            result.append(level)
            continue
        inner = {min(block.cpus): block for block in level.blocks}
        blocks = tuple(
            Block(
                b.cpus,
                b.attrs + inner[min(b.cpus)].attrs,
                b.os if b.os is not None else inner[min(b.cpus)].os,
            )
            for b in above.blocks
        )
        result[-1] = Partition(f"{above.kind}+{level.kind}", blocks)
    return result


def _node(block: Block, kind: str, below: list[Partition]) -> TopoNode:
    if not below:
        return TopoNode(kind, block.attrs, (), block.os if block.os is not None else block.cpus[0])
    members = set(block.cpus)
    inside = sorted((b for b in below[0].blocks if members.issuperset(b.cpus)), key=lambda b: min(b.cpus))
    children = tuple(_node(b, below[0].kind, below[1:]) for b in inside)
    return TopoNode(kind, block.attrs, children, block.os)


def group(tree: TopoTree, depth: int, stride: int) -> TopoTree:
    """Insert a level of Groups: under every node of depth-1, each takes `stride` neighbouring children.

    Raises: TopologyError unless 1 < stride < n and stride divides n for every parent, or for threads of a core.
    """
    _check_depth(tree, depth)
    if tree.kinds[depth] == "Pu":
        raise TopologyError("threads of one core cannot be grouped: a core is never split over groups")
    for parent in tree.level(depth - 1):
        n = len(parent.children)
        if not 1 < stride < n or n % stride:
            raise TopologyError(f"stride {stride} does not cut the {n} children of a {parent.kind} evenly")

    def grouped(parent: TopoNode) -> TopoNode:
        starts = range(0, len(parent.children), stride)
        return replace(
            parent, children=tuple(TopoNode(GROUP, (), parent.children[i : i + stride]) for i in starts)
        )

    return replace(tree, root=_at(tree.root, depth - 1, grouped))


def remove(tree: TopoTree, depth: int, idx: Iterable[int]) -> TopoTree:
    """Delete the children at positions idx under every node of depth-1. Raises: TopologyError."""
    _check_depth(tree, depth)
    gone = set(idx)
    for parent in tree.level(depth - 1):
        positions = set(range(len(parent.children)))
        if not gone <= positions or gone == positions:
            raise TopologyError(
                f"cannot remove children {sorted(gone)} of a {parent.kind} with {len(positions)}"
            )

    def thinned(parent: TopoNode) -> TopoNode:
        return replace(parent, children=tuple(c for i, c in enumerate(parent.children) if i not in gone))

    return replace(tree, root=_at(tree.root, depth - 1, thinned))


def _check_depth(tree: TopoTree, depth: int) -> None:
    if not 0 < depth < len(tree.kinds):
        raise TopologyError(f"depth must be 1..{len(tree.kinds) - 1}, got {depth}")


def _at(node: TopoNode, depth: int, change: Callable[[TopoNode], TopoNode]) -> TopoNode:
    if depth == 0:
        return change(node)
    return replace(node, children=tuple(_at(child, depth - 1, change) for child in node.children))


def tree_key(tree: TopoTree) -> str:
    """Hex key of the tree's shape and attributes; CPU numbers and the order of siblings do not enter."""
    return _hash(tree.root)


@lru_cache(maxsize=1 << 16)
def _hash(node: TopoNode) -> str:
    parts = (
        ("leaf", node.attrs)
        if not node.children
        else (node.kind, node.attrs, *sorted(map(_hash, node.children)))
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def service_key(tree: TopoTree, rank_depth: int) -> str:
    """Hex key of what a service sees: which units are ranks, and what they hold.

    Groups that are not the rank level disappear, and a node with one child is one with it.
    """
    return _hash(_simplified(tree.root, rank_depth))


RANK = ("rank",)


def _simplified(node: TopoNode, rank_depth: int) -> TopoNode:
    attrs = (*node.attrs, RANK) if rank_depth == 0 else node.attrs
    children: list[TopoNode] = []
    for child in node.children:
        inner = _simplified(child, rank_depth - 1)
        # A Group that is no rank only says which cores stay.
        children += inner.children if inner.kind == GROUP and RANK not in inner.attrs else (inner,)
    if len(children) != 1:
        return TopoNode(node.kind, attrs, tuple(children))
    (only,) = children
    kinds = [k for k in (node.kind, only.kind) if k != GROUP]
    merged = tuple(sorted({*attrs, *only.attrs}, key=repr))
    return TopoNode("+".join(kinds), merged, only.children)


def enumerate_trees(tree: TopoTree) -> Iterator[TopoTree]:
    """Distinct trees by at most one group, then uniform removals that keep the first k of n.

    Cost: the product of the fan-outs, times one more for each possible group.
    """
    if not tree.regular:
        yield tree
        return
    seen = set()
    for base in (tree, *_all_groups(tree)):
        fan_outs = [len(base.level(d)[0].children) for d in range(len(base.kinds) - 1)]
        for keep in itertools.product(*(range(1, n + 1) for n in fan_outs)):
            thinned = TopoTree(_keep_first(base.root, keep), tree.notes)
            key = tree_key(thinned)
            if key not in seen:
                seen.add(key)
                yield thinned


def _all_groups(tree: TopoTree) -> Iterator[TopoTree]:
    for depth in range(1, len(tree.kinds)):
        n = len(tree.level(depth - 1)[0].children)
        if tree.kinds[depth] != "Pu":
            yield from (group(tree, depth, stride) for stride in range(2, n) if n % stride == 0)


def _keep_first(node: TopoNode, keep: tuple[int, ...]) -> TopoNode:
    if not keep:
        return node
    return replace(node, children=tuple(_keep_first(child, keep[1:]) for child in node.children[: keep[0]]))


@dataclass(frozen=True)
class ServiceConfig:
    """One way to serve: ranks as CPU tuples in thread order. nonlocal_memory: a rank spans Numa nodes."""

    key: str
    rank_kind: str
    ranks: tuple[tuple[int, ...], ...]
    nonlocal_memory: bool


def service_configs(tree: TopoTree) -> dict[str, ServiceConfig]:
    """Service key -> configuration, over all trees and all rank levels above the hardware threads.

    An irregular tree offers its Numa nodes (or its whole machine) as ranks, nothing else.
    """
    found: dict[str, ServiceConfig] = {}
    for candidate in enumerate_trees(tree):
        numa = next((d for d, kind in enumerate(candidate.kinds) if "Numa" in kind), 0)
        depths = range(len(candidate.kinds) - 1) if tree.regular else [numa]
        for depth in depths:
            key = service_key(candidate, depth)
            if key not in found:
                ranks = tuple(breadth_first(node) for node in candidate.level(depth))
                found[key] = ServiceConfig(key, candidate.kinds[depth], ranks, nonlocal_memory=depth < numa)
    return found


def breadth_first(node: TopoNode) -> tuple[int, ...]:
    """CPUs below a node in the order threads are bound: the first core of every domain, then the second, ...

    Second threads of all cores come after all first threads, so the first n CPUs are the best n threads.
    """
    return _threads_last(_interleaved(node))


def _interleaved(node: TopoNode) -> list[tuple[int, ...]]:
    """Cores (tuples of their CPUs) below a node, one of each child in turn."""
    if not node.children or node.children[0].kind == "Pu":
        return [node.cpus]
    orders = [_interleaved(child) for child in node.children]
    rounds = itertools.zip_longest(*orders)
    return [core for cores in rounds for core in cores if core is not None]


def _threads_last(cores: list[tuple[int, ...]]) -> tuple[int, ...]:
    rounds = itertools.zip_longest(*cores)
    return tuple(cpu for cpus in rounds for cpu in cpus if cpu is not None)


def render_tree(tree: TopoTree) -> str:
    """`tree: 2 Package > 4 Numa > ...` with the nodes of each level, then what was left out."""
    counts = [f"{len(tree.level(depth))} {kind}" for depth, kind in enumerate(tree.kinds)]
    shape = "" if tree.regular else " (irregular: levels have uneven branches)"
    return "\n".join([f"tree: {' > '.join(counts[1:])}{shape}", *(f"note: {note}" for note in tree.notes)])


def tree_dict(tree: TopoTree) -> dict[str, Any]:
    """Plain data for JSON: levels with the CPUs of each node, the key, and the order threads are bound in."""
    levels = [
        {"kind": kind, "cpus": [format_list(node.cpus) for node in tree.level(depth)]}
        for depth, kind in enumerate(tree.kinds)
    ]
    return {
        "key": tree_key(tree),
        "regular": tree.regular,
        "levels": levels,
        "thread_order": list(breadth_first(tree.root)),
        "notes": list(tree.notes),
    }
