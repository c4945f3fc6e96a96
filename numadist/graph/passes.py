"""What a pass over a graph is: a rewrite that says which facts it needs and which it leaves.

The passes themselves are listed in one place, numadist/pipeline/passes.py. Outside of tests the facts are
documentation; tests switch `checking` on, and every run then looks at the graph before and after each pass.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

Check = Callable[[GraphModule], str]


@dataclass(frozen=True)
class Fact:
    """Something that is true of a graph. violation(gm): where it is not, in words; empty where it holds."""

    name: str
    violation: Check


@dataclass(frozen=True)
class Pass:
    """One rewrite in place. needs: what must hold before; leaves: what holds after, whatever held before.

    keeps: other facts that were true before are still true after it; checked for those named.
    """

    run: Callable[[GraphModule], object]
    does: str
    needs: tuple[Fact, ...] = ()
    leaves: tuple[Fact, ...] = ()
    keeps: tuple[Fact, ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.run, "__name__", str(self.run))


_checks = False


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Have every pass of the block checked for what it says: for tests."""
    global _checks
    before, _checks = _checks, True
    try:
        yield
    finally:
        _checks = before


def run_passes(gm: GraphModule, passes: Iterable[Pass], runs: bool = True) -> None:
    """Run the passes in their order; dead nodes are dropped after each.

    runs: the module will be called itself; for a compiler, which reads its graph, the Python code of it is not made.
    """
    for step in passes:
        kept: list[Fact] = []
        if _checks:
            _require(gm, step, step.needs, "needs")
            kept = [fact for fact in step.keeps if not fact.violation(gm)]
        step.run(gm)
        gm.graph.eliminate_dead_code()
        if _checks:
            _require(gm, step, step.leaves, "should leave")
            _require(gm, step, kept, "should keep")
    if runs:
        gm.recompile()


def _require(gm: GraphModule, step: Pass, facts: Iterable[Fact], verb: str) -> None:
    for fact in facts:
        where = fact.violation(gm)
        assert not where, f"pass {step.name} {verb} {fact.name!r}: {where}"
