"""Compiled parts: one of each kind, kept by torch's cache for other processes, right for every size."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from numadist.lowering import one_compiler
from numadist.lowering.compiled_model import CompiledModel, layers_repeat
from numadist.pipeline.stages import Site, capture, localize
from numadist.sharding.build_schema import build_schema


class Layer(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = torch.nn.LayerNorm(size)
        self.up, self.down = torch.nn.Linear(size, 2 * size), torch.nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(torch.nn.Module):
    def __init__(self, layers, size=16):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*(Layer(size) for _ in range(layers)))
        self.head = torch.nn.Linear(size, 5)

    def forward(self, x, scale=1.0):
        return {"out": self.head(self.layers(x) * scale)}


def compiled(model, inputs, **options):
    captured = capture(model, inputs, **options)
    return localize(captured, build_schema(captured, 1), Site(0, None)).compile()


@pytest.mark.parametrize("layers", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_one_layer_is_compiled_and_called_for_all(layers):
    model, x = Stack(layers).eval(), torch.randn(2, 3, 16)
    run = compiled(model, {"x": x, "scale": 1.0})
    assert isinstance(run, CompiledModel)
    torch.testing.assert_close(run(x=x, scale=1.0)["out"], model(x)["out"])
    (program,) = run.programs
    assert program.num_compiled == 2, "a layer, and what follows the last"
    assert len(program.modules) == layers + 1


def test_other_sizes_compile_nothing_new_and_are_right():
    model, x = Stack(3).eval(), torch.randn(4, 3, 16)
    dims = {0: torch.export.Dim("rows", max=64), 1: torch.export.Dim("tokens", max=64)}
    run = compiled(model, {"x": x}, dynamic_shapes={"x": dims})
    for rows, tokens in ((4, 3), (2, 9), (31, 2)):
        x = torch.randn(rows, tokens, 16)
        torch.testing.assert_close(run(x=x)["out"], model(x)["out"])
    assert len(run.programs) == 1
    strided = torch.randn(5, 6, 32)[:, :, ::2]
    torch.testing.assert_close(run(x=strided)["out"], model(strided)["out"])
    assert len(run.programs) == 2, "another layout is other code"


class Branching(Stack):
    """What torch makes of this depends on a size: it must be asked again for another one."""

    def forward(self, x):
        return self.layers(x).view(-1, 4, 16)[:, 0]


def test_code_that_holds_for_some_sizes_is_used_for_those_only():
    model, x = Branching(3).eval(), torch.randn(8, 3, 16)
    run = compiled(model, (x,), dynamic_shapes=({0: torch.export.Dim("quarter", max=16) * 4},))
    assert not isinstance(run, CompiledModel), "a dim that is no plain size is left to torch.compile"
    for rows in (8, 4, 16):
        x = torch.randn(rows, 3, 16)
        torch.testing.assert_close(run(x), model(x))


def test_what_cannot_be_taken_apart_is_compiled_whole():
    x = torch.randn(2, 16)
    assert not layers_repeat(capture(Layer(16).eval(), x).gm), "nothing repeats"
    noisy = torch.nn.Sequential(*(torch.nn.Sequential(Layer(16), torch.nn.Dropout()) for _ in range(4)))
    assert not layers_repeat(capture(noisy.train(), x).gm), "it draws random numbers"


SECOND_PROCESS = textwrap.dedent(
    """
    import sys
    sys.path[:0] = sys.argv[1:]
    import torch
    from torch._dynamo.utils import counters
    from test_compiled_parts import Stack, compiled
    torch.set_num_threads(1)
    x = torch.ones(2, 3, 16)
    model = Stack(5).eval()
    torch.testing.assert_close(compiled(model, {"x": x})(x=x)["out"], model(x)["out"])
    print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
    """
)


def start(folder):
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    here = os.path.dirname(__file__)
    command = [sys.executable, "-W", "ignore", "-c", SECOND_PROCESS, here]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def finished(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return [int(n) for n in out.split()]


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    assert finished(start(tmp_path)) == [2, 0]
    assert finished(start(tmp_path)) == [0, 2]


@pytest.mark.slow
def test_two_processes_at_once_compile_each_part_once(tmp_path):
    both = [start(tmp_path) for _ in range(2)]
    misses, hits = map(sum, zip(*map(finished, both), strict=True))
    assert (misses, hits) == (2, 2)


def test_what_another_process_compiles_is_waited_for(tmp_path, monkeypatch):
    """A claim of another process, here of another thread, is respected; things without one come first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    order, claimed, go_on = [], threading.Event(), threading.Event()

    def other():
        with one_compiler._claimed("a") as mine:
            assert mine
            claimed.set()
            go_on.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    claimed.wait(60)

    def compile(key):
        order.append(key)
        go_on.set()
        return key.upper()

    assert one_compiler.shared_out({"first": "a", "second": "b"}, compile) == {
        "first": "FIRST",
        "second": "SECOND",
    }
    thread.join()
    assert order == ["second", "first"]


HOLDER = textwrap.dedent(
    """
    import os
    import sys
    from numadist.lowering import one_compiler
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
    with one_compiler._claimed("a") as mine:
        print(mine, flush=True)
        sys.stdin.read()
    """
)


def test_a_killed_process_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "True\n"
    with one_compiler._claimed("a") as mine:
        assert not mine
    stopped = one_compiler.shared_out({"key": "a"}, lambda key: "alone", patience_s=0.0)
    assert stopped == {"key": "alone"}, "a process that never ends is not waited for"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    with one_compiler._claimed("a") as mine:
        assert mine
