"""numarun --plan: the ranks of a plan file."""

import os
from dataclasses import replace

from numadist.errors import PlanError
from numadist.launch.options import Options
from numadist.phases.plan import PlanPair, load_plan
from numadist.topology.machine import Machine
from numadist.topology.tree import build_tree, tree_key


def with_plan(options: Options, machine: Machine, root: str) -> tuple[Options, tuple[int, ...]]:
    """Options with the CPUs of the plan's ranks, and all its CPUs in thread order. Raises: PlanError.

    Threads are pinned only where the phases differ in them: with libgomp, pinned threads leave the main thread one CPU.
    """
    path = os.path.abspath(options.plan or "")
    plan = load_plan(path)
    check_machine(plan, machine, root, path)
    differ = plan.prefill != plan.decode
    env = [("NUMADIST_PLAN", path), *([("KMP_HOT_TEAMS_MODE", "1")] if differ else [])]
    options = replace(
        options,
        request=replace(options.request, cpus=tuple(rank.cpus for rank in plan.prefill.ranks)),
        env=(*env, *options.env),
        omp_bind="cores" if differ else options.omp_bind,
    )
    return options, tuple(cpu for rank in plan.prefill.ranks for cpu in rank.cpus)


def check_machine(plan: PlanPair, machine: Machine, root: str, path: str) -> None:
    """Raises: PlanError if the plan was made for other CPUs than this process may use."""
    key = tree_key(build_tree(machine, root))
    if plan.topology_key not in ("", key):
        raise PlanError(
            f"plan {path} was made for other CPUs: their topology key is {plan.topology_key}, here it is {key}; "
            "run numadist tune here, with the CPUs the job will have"
        )
