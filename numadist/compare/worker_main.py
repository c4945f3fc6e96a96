"""What a variant's processes run.

`python -m numadist.compare.worker_main SOCKET VARIANT MODEL DTYPE LONGEST CPUS NODES PYTHON`, under numarun where there
are ranks. PYTHON: the interpreter that has llama-cpp-python.
A single process first widens or narrows its CPUs and sets its memory policy, and only then imports torch: what it
inherits from the harness, or from a pinned rank that asks for a baseline, must not count.
"""

import signal
import sys
from collections.abc import Callable
from typing import Any

from numadist import _syscalls, binding
from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.variants import VARIANTS, Variant
from numadist.compare.worker_loop import OneShape, connect, serve, timed
from numadist.topology.cpuset import parse_list


def main() -> None:
    """Entry point of the worker's processes."""
    address, name, model, dtype, longest, cpu_list, node_list, llama_python = sys.argv[1:]
    variant, subject = VARIANTS[name], ModelUnderTest(model, dtype, int(longest))
    if variant.process == "ranks":
        from numadist.compare.ranks import serve_rank

        serve_rank(address, variant, subject)
        return
    _syscalls.set_parent_death_signal(signal.SIGKILL)
    cpus = parse_list(cpu_list)
    binding.bind_cpus(cpus)
    # `default` is Linux's own: local to whoever touches first, undoing what a pinned parent bound.
    policy = "local" if variant.policy == "default" else variant.policy
    binding.bind_memory(policy, parse_list(node_list))
    with connect(address) as pipe:
        if variant.process == "inprocess":
            shapes = OneShape(subject, in_process)
        else:
            shapes = OneShape(subject, single_process(variant, len(cpus), llama_python))
        serve(pipe, lambda batch, seq, times, input_ids: timed(*shapes(batch, seq, input_ids), times))


def single_process(
    variant: Variant, num_threads: int, llama_python: str
) -> Callable[[Any, dict[str, Any]], Any]:
    """The unsharded model in one process, as OneShape makes it."""
    import torch

    torch.set_num_threads(num_threads)
    if variant.compile == "none":
        return lambda model, inputs: model
    if variant.packages:
        from numadist.compare import peers

        if variant.compile == "llama.cpp":
            return lambda model, inputs: peers.LlamaCpp(model, inputs, num_threads, llama_python)
        convert = peers.openvino if variant.compile == "openvino" else peers.onnxruntime
        return lambda model, inputs: convert(model, inputs, num_threads)
    # As an option of torch.compile it would do nothing: see numadist/lowering/freezing.py.
    torch._inductor.config.freezing = variant.compile == "freezing"
    return lambda model, inputs: torch.compile(model, dynamic=False)


def in_process(model: Any, inputs: dict[str, Any]) -> Any:
    """The model split over thread groups of one process, as OneShape makes it."""
    from numadist import inprocess
    from numadist.topology.sysfs import read_machine

    groups = None if len(read_machine().domains) > 1 else 2
    return inprocess.shard(model, inputs, nodes=groups, compile=True)


if __name__ == "__main__":
    main()
