"""`numadist COMMAND`: what the machine is, what a bug report needs, what a model would become."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from numadist.errors import NumadistError
from numadist.topology.cpuset import parse_list
from numadist.topology.render import render
from numadist.topology.sysfs import read_machine
from numadist.topology.tree import build_tree, enumerate_trees, render_tree, service_configs, tree_dict

# Command -> (module:function, one line of help). The function takes the remaining words and returns an exit
# code; its module is imported only when the command is used, so `numadist topo` never waits for torch.
COMMANDS = {
    "topo": (
        "numadist.commands.main:topo",
        "sockets, NUMA nodes, cores, distances, and what this process may use",
    ),
    "generate": (
        "numadist.commands.generate:main",
        "continue a prompt with a model's folder or .gguf file, on a rank a NUMA node",
    ),
    "compare": (
        "numadist.commands.compare:main",
        "does it pay? one process, numactl policies and ranks, in turn",
    ),
    "bench": (
        "numadist.commands.bench:main",
        "serve --synthetic: latencies and goodput of three schedules",
    ),
    "vllm": (
        "numadist.launch.vllm:main",
        "serve MODEL -tp 2 ...: vLLM with its workers on NUMA nodes and our collectives",
    ),
    "profile": ("numadist.commands.profile:main", "measure this machine for the cost model"),
    "tune": ("numadist.commands.tune:main", "measure ranks and threads for both phases: plan.json"),
    "simulate": ("numadist.commands.simulate:main", "predicted speed-ups on machines nobody here has"),
    "explain": ("numadist.commands.explain:main", "how a model would be sharded: blocks, placements, bytes"),
    "info": ("numadist.commands.info:main", "versions and machine, for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `numadist`; returns the exit code: 1 for a NumadistError, 2 for a bad command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] not in COMMANDS:
        print(f"numadist: error: unknown command {words[0]!r}\n{_usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[words[0]][0].partition(":")
    try:
        return getattr(importlib.import_module(module), function)(words[1:])
    except NumadistError as error:
        print(f"numadist: error: {error}", file=sys.stderr)
        return 1


def topo(argv: Sequence[str]) -> int:
    """`numadist topo`: the machine as numarun sees it."""
    parser = argparse.ArgumentParser(prog="numadist topo", description=COMMANDS["topo"][1])
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--configs", action="store_true", help="count the service configurations of its tree")
    parser.add_argument("--sysfs", metavar="ROOT", default="/", help="read a recorded machine below ROOT")
    parser.add_argument("--allowed-cpus", metavar="LIST", type=parse_list, help="with --sysfs: CPUs allowed")
    parser.add_argument("--allowed-mems", metavar="LIST", type=parse_list, help="with --sysfs: nodes allowed")
    options = parser.parse_args(argv)
    machine = read_machine(options.sysfs, options.allowed_cpus, options.allowed_mems)
    tree = build_tree(machine, options.sysfs)
    if options.json:
        print(json.dumps({**machine.to_dict(), "tree": tree_dict(tree)}, indent=2))
        return 0
    print(render(machine))
    print(render_tree(tree))
    if options.configs:
        print(
            f"{len(service_configs(tree))} service configurations of {len(list(enumerate_trees(tree)))} trees"
        )
    return 0


def _usage() -> str:
    lines = ["usage: numadist COMMAND [options]", ""]
    return "\n".join(lines + [f"  {name:<10}{help_text}" for name, (_, help_text) in COMMANDS.items()])


if __name__ == "__main__":
    sys.exit(main())
