"""Compiled code that one start leaves to the next: used where it is right, and else as if it were not there."""

import json

import pytest
import torch
from test_compiled_parts import Stack, compiled

import numadist.config
from numadist.cache.store import Store
from numadist.graph.query import aten
from numadist.graph.repeats import Call, Division
from numadist.lowering import compiled_parts, kept_code
from numadist.lowering.compiled_parts import compile_parts

ROWS = {0: torch.export.Dim("rows", max=64)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numadist.config, "_config", numadist.config.Config(cache_dir=str(tmp_path / "cache")))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """How many parts each program made Inductor compile."""
    compile, counted = compiled_parts._Compiler._compile, []

    def counting(self, kind):
        counted.append(kind)
        return compile(self, kind)

    monkeypatch.setattr(compiled_parts._Compiler, "_compile", counting)
    return counted


def ran(model, x):
    run = compiled(model, {"x": x}, dynamic_shapes={"x": ROWS})
    torch.testing.assert_close(run(x=x)["out"], model(x)["out"])
    (program,) = run.programs
    return program


def entries(folder) -> dict[str, dict]:
    store = Store(folder)
    names = [path.stem for path in folder.glob("code-*.entry")]
    found = {name: store.read(name) for name in names}
    return {name: json.loads(data) for name, data in found.items() if data.startswith(b"{")}


def test_the_second_time_nothing_is_traced_or_compiled(folder, compilations, monkeypatch):
    model, x = Stack(3).eval(), torch.randn(4, 3, 16)
    first = ran(model, x)
    assert len(compilations) == 2
    monkeypatch.setattr(compiled_parts._Compiler, "__init__", None)
    second = ran(model, torch.randn(4, 3, 16))
    assert (second.num_compiled, len(second.modules)) == (first.num_compiled, len(first.modules)) == (2, 4)


def test_parts_that_are_alike_are_taken_from_another_model(folder, compilations):
    ran(Stack(3).eval(), torch.randn(4, 3, 16))
    ran(Stack(5).eval(), torch.randn(4, 3, 16))
    assert len(compilations) == 2, "five layers are calls of what three are"


@pytest.mark.parametrize("change", ["source", "runs", "gone"])
def test_an_entry_that_is_of_no_use_is_as_none(folder, compilations, change):
    model, x = Stack(3).eval(), torch.randn(4, 3, 16)
    ran(model, x)
    for name, what in entries(folder).items():
        if change == "source" and "source" in what:
            Store(folder).write(name, json.dumps({**what, "source": "raise SystemError"}).encode())
        if change == "runs" and "runs" in what:
            Store(folder).write(name, json.dumps({**what, "parts": ["code-0"]}).encode())
        if change == "gone" and "source" in what:
            (folder / f"{name}.entry").unlink()
    ran(model, x)
    assert len(compilations) == (2 if change == "runs" else 4)


def test_another_number_of_threads_is_other_code(folder, compilations):
    model, x, before = Stack(3).eval(), torch.randn(4, 3, 16), torch.get_num_threads()
    ran(model, x)
    try:
        torch.set_num_threads(before + 1)
        ran(model, x)
    finally:
        torch.set_num_threads(before)
    assert len(compilations) == 4


@pytest.mark.parametrize("name", ["post_grad_custom_post_pass", "custom_partitioner_fn"])
def test_with_a_users_own_pass_nothing_is_kept(folder, compilations, monkeypatch, name):
    with torch._inductor.config.patch({name: lambda graph: None}):
        assert kept_code._environment() == ""
    with torch._inductor.config.patch(force_disable_caches=True):
        assert kept_code._environment() == ""
    assert kept_code._environment() != ""


def one_part(build, *shapes):
    """A graph that is one part, of what build makes of its inputs."""
    gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    inputs = [gm.graph.placeholder(f"x{i}") for i, _ in enumerate(shapes)]
    outputs = build(gm.graph, *inputs)
    gm.graph.output(outputs)
    part = torch.fx.GraphModule(torch.nn.Module(), gm.graph)
    return gm, Division([], [part], [str(gm.graph)], [Call(0, tuple(inputs), tuple(outputs))])


def test_what_is_more_than_inductors_code_is_not_kept(folder, compilations):
    """Torch makes an output that is a view of an input itself."""

    def build(graph, x):
        return [
            graph.call_function(aten.view.default, (x, [-1])),
            graph.call_function(aten.add.Tensor, (x, 1)),
        ]

    x = torch.randn(4, 3)
    for _ in range(2):
        viewed, more = compile_parts(*one_part(build, x.shape), [x], [{}], {})([x])
        assert viewed.data_ptr() == x.data_ptr()
        torch.testing.assert_close(more, x + 1)
    assert len(compilations) == 2
    assert entries(folder) == {}


def test_what_code_takes_for_granted_is_kept_with_it(folder, compilations):
    def build(graph, x, y):
        return [graph.call_function(aten.add.Tensor, (x, y))]

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(2):
        graph = one_part(build, x.shape, y.shape)
        program = compile_parts(*graph, [x, y], [{0: "rows"}, {}], {"rows": 8})
        torch.testing.assert_close(program([x, y])[0], x + y)
        assert program.holds_for([8])
        assert not program.holds_for([7])
    assert len(compilations) == 1


def test_code_for_some_sizes_is_found_by_any(folder, compilations):
    """Sizes that code is tuned for, and those of the inputs, are two things."""

    def build(graph, x):
        return [graph.call_function(aten.add.Tensor, (x, 1))]

    for rows in (3, 9):
        x = torch.randn(rows, 4)
        (more,) = compile_parts(*one_part(build, x.shape), [x], [{0: "rows"}], {"rows": 8})([x])
        torch.testing.assert_close(more, x + 1)
    assert len(compilations) == 1
