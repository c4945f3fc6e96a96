"""A graph from the cache folder is the one that a capture gives, over the model's own tensors."""

import importlib
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the extra `models`")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sharding"))
from zoo import ZOO, causal, main_output, make

import numadist.config
from numadist.errors import ShardError
from numadist.generation.step import capture_step
from numadist.graph.capture import as_args
from numadist.graph.model_key import NoKey, model_key
from numadist.pipeline import remember
from numadist.pipeline.stages import Site, capture, localize
from numadist.sharding.build_schema import build_schema


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setattr(numadist.config, "_config", numadist.config.Config(cache_dir=str(tmp_path / "cache")))
    return tmp_path / "cache"


@pytest.fixture
def captures(monkeypatch):
    """How often torch.export has run."""
    count = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: count.append(1) or export(*a, **k))
    return count


def entries(folder):
    return sorted(folder.glob("*.entry"))


def identities(tensors):
    return [(name, id(t)) for name, t in tensors]


def nodes(gm):
    return [
        (n.op, n.name, str(n.target), str(n.args), str(n.kwargs), str(n.meta.get("val")))
        for n in gm.graph.nodes
    ]


def check_alike(fresh, loaded, model, inputs):
    assert nodes(loaded.gm) == nodes(fresh.gm)
    for num_ranks in (2, 3):
        one, other = build_schema(fresh, num_ranks), build_schema(loaded, num_ranks)
        assert other.to_json() == one.to_json()
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    for kind in ("named_parameters", "named_buffers"):
        one, other = (list(getattr(c.gm, kind)(remove_duplicate=False)) for c in (fresh, loaded))
        assert [name for name, _ in other] == [name for name, _ in one]
        assert identities((n, t) for n, t in other if id(t) in own) == identities(
            (n, t) for n, t in one if id(t) in own
        )
        for (name, t), (_, u) in zip(one, other, strict=True):
            assert torch.equal(t, u), name
            assert t.requires_grad == u.requires_grad, name
    assert {id(p) for p in loaded.gm.parameters()} <= own
    assert list(loaded.gm.state_dict()) == list(fresh.gm.state_dict())
    args, kwargs = as_args(inputs)
    with torch.no_grad():
        seen, truth = (main_output(c.gm(*args, **kwargs)) for c in (loaded, fresh))
    assert torch.equal(seen, truth)


def twice(folder, *arguments):
    """Captured, and read."""
    fresh = capture(*arguments)
    assert len(entries(folder)) == 1, "the graph was not written"
    return fresh, capture(*arguments)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("gpt2", "llama", "t5") else pytest.mark.slow) for n in ZOO]
)
def test_every_architecture_comes_back_as_it_was(name, folder, captures):
    model, entry = make(name), ZOO[name]
    fresh, loaded = twice(folder, model, entry.inputs(), entry.dynamic)
    assert len(captures) == 1
    check_alike(fresh, loaded, model, entry.longer() if entry.longer else entry.inputs())
    for field in (
        "name",
        "tied_names",
        "constants",
        "one_shape",
        "persistent_buffers",
        "state_names",
        "training",
    ):
        assert getattr(fresh, field) == getattr(loaded, field), field


def test_inputs_of_another_shape_are_refused_as_after_a_capture(folder):
    x = torch.randn(2, 8)
    for captured in twice(folder, nn.Linear(8, 8), (x,)):
        captured.gm(x)
        with pytest.raises(AssertionError, match="Guard failed"):
            captured.gm(torch.randn(3, 8))
        with pytest.raises(ValueError, match="same number and type"):
            captured.gm(x, x)


def test_a_step_of_generation_takes_any_rows_tokens_and_slots(folder, captures):
    model = make("llama")
    fresh, loaded = capture_step(model), capture_step(model)
    assert len(captures) == 1
    ids = torch.randint(100, (3, 5), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(5).repeat(3, 1)

    def kv(size):
        return [torch.zeros(3, k.num_heads, 32, getattr(k, size), dtype=k.dtype) for k in loaded.layers]

    seen, truth = (
        step.gm(ids, positions, positions.clone(), kv("key_size"), kv("value_size"))
        for step in (loaded, fresh)
    )
    assert torch.equal(seen, truth)
    assert nodes(loaded.gm) == nodes(fresh.gm)


def test_what_was_read_compiles_and_trains(folder, captures):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))).eval()
    rows = ({0: torch.export.Dim("rows", max=64)},)
    _, loaded = twice(folder, model, (torch.randn(4, 16),), rows)
    run = localize(loaded, build_schema(loaded, 1), Site(0, None)).compile()
    for count in (4, 7):
        x = torch.randn(count, 16)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
    for _ in range(2):
        gm = capture(model, (x,), rows, True).gm
        gradients = [torch.autograd.grad(f(x).sum(), list(model.parameters())) for f in (gm, model)]
        torch.testing.assert_close(*gradients)
    assert len(captures) == 2


def test_the_file_has_no_weights(folder):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).eval()
    held = [t for t in (*model.parameters(), *model.buffers()) if t.numel() > 1]
    with torch.no_grad():
        for t in held:
            t.copy_(torch.rand_like(t) + 1)
    capture(model, (torch.randn(2, 64),))
    (entry,) = entries(folder)
    data = entry.read_bytes()
    for t in held:
        assert t.detach().reshape(-1)[:2].numpy().tobytes() not in data


def test_the_loaded_graph_follows_the_present_models_weights(folder):
    x = torch.randn(2, 8)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    capture(first, (x,))
    loaded = capture(second, (x,))
    assert len(entries(folder)) == 1
    assert loaded.gm.weight is second.weight
    with torch.no_grad():
        second.weight.mul_(2)
    assert torch.equal(loaded.gm(x), second(x))


MODEL = """
import torch
from helper import scaled

class Model(torch.nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        self.slope = 0.5

    def forward(self, x):
        return scaled(torch.relu(self.linear(x)), self.slope)
"""
HELPER = """
def scaled(x, slope):
    return x * slope
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Function that writes, loads and makes a model of two files."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make_model(model=MODEL, helper=HELPER):
        for name, text in (("helper", helper), ("one_model", model)):
            (tmp_path / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        remember.files_digest.__globals__["_file_digest"].cache_clear()
        torch.manual_seed(0)
        return importlib.import_module("one_model").Model()

    yield make_model
    for name in ("helper", "one_model"):
        sys.modules.pop(name, None)


def test_a_changed_line_misses(folder, written, captures):
    x = torch.randn(2, 8)
    for texts in (
        {},
        {"model": MODEL.replace("torch.relu", "torch.sigmoid")},
        {"helper": HELPER.replace("*", "+")},
        {"helper": HELPER + "# a line more\n"},
    ):
        changed = written(**texts)
        assert torch.equal(capture(changed, (x,)).gm(x), changed(x))
    assert len(captures) == len(entries(folder)) == 4
    model = written()
    assert torch.equal(capture(model, (x,)).gm(x), model(x))
    assert len(captures) == 4, "the first one is still there"


def test_code_that_was_loaded_again_is_not_remembered(folder, written, captures):
    x, old = torch.randn(2, 8), written()
    written(helper=HELPER.replace("*", "+"))
    for _ in range(2):
        assert torch.equal(capture(old, (x,)).gm(x), old(x))
    assert len(captures) == 2
    assert not entries(folder)


def test_what_decides_the_graph_misses(folder, written, captures):
    x = torch.randn(2, 8)
    make_model = type(written())
    capture(make_model(), (x,))
    slower, wide, frozen = make_model(), make_model().to(torch.bfloat16), make_model()
    slower.slope = 0.25
    frozen.linear.bias.requires_grad_(False)
    tries = [
        (slower, (x,)),
        (wide, (x.bfloat16(),)),
        (frozen, (x,)),
        (make_model().eval(), (x,)),
        (make_model(), (torch.randn(3, 8),)),
        (make_model(), (x,), ({0: torch.export.Dim("rows")},)),
        (make_model(), (x,), ({0: torch.export.Dim("rows", max=9)},)),
        (make_model(), (x,), None, True),
    ]
    for number, arguments in enumerate(tries, 2):
        capture(*arguments)
        assert len(captures) == number, arguments[1:]


def test_globals_count_that_the_code_uses(folder, written, captures):
    x = torch.randn(2, 8)
    model = written(
        helper="import math as other\nSCALES, unused = [2.0], 1\ndef scaled(x, slope):\n    return x * SCALES[0]"
    )
    helper = sys.modules["helper"]
    assert torch.equal(capture(model, (x,)).gm(x), model(x))
    helper.unused = 2
    capture(model, (x,))
    assert len(captures) == 1
    helper.SCALES.append(3.0)
    helper.SCALES.pop(0)
    assert torch.equal(capture(model, (x,)).gm(x), model(x))
    assert len(captures) == 2


def test_another_config_misses(folder, captures):
    model = make("llama")
    capture(model, causal())
    model.config.rms_norm_eps = 0.1
    capture(model, causal())
    assert len(captures) == 2


def test_a_function_put_in_the_place_of_another_misses(folder, captures, monkeypatch):
    import transformers.models.llama.modeling_llama as llama

    capture(make("llama"), causal())
    monkeypatch.setattr(llama, "rotate_half", lambda x: x)
    capture(make("llama"), causal())
    assert len(captures) == 2
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: x)
    capture(make("llama"), causal())
    assert len(captures) == 3


def test_tied_weights_have_another_key():
    tied, apart = (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
    tied[1].weight = tied[0].weight
    assert model_key(tied) != model_key(apart)


class Attribute(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return x * 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ((i for i in range(3)), "a builtins.generator"),
        (torch.randn(1 << 17), "a tensor of (131072,) that is no parameter and no buffer"),
        ({object}, "a set of objects, whose order changes"),
    ],
)
def test_what_no_key_holds_is_not_remembered(folder, captures, caplog, value, reason):
    caplog.set_level(logging.DEBUG, "numadist")
    for _ in range(2):
        capture(Attribute(value), (torch.randn(2),))
    assert len(captures) == 2
    assert f"the graph of Attribute is not remembered: it has {reason}" in caplog.text


def test_hooks_and_functions_of_one_instance_have_no_key():
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(NoKey, match="has hooks"):
        model_key(model)
    model = nn.Linear(4, 4)
    model.forward = lambda x: x
    with pytest.raises(NoKey, match="forward of its own"):
        model_key(model)


def test_an_entry_cut_anywhere_is_ignored_and_replaced(folder, captures):
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    capture(model, (x,))
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    cuts = [*range(0, 64, 9), *range(64, len(whole), len(whole) // 5), len(whole) - 1]
    for number, cut in enumerate(cuts, 2):
        entry.write_bytes(whole[:cut])
        assert torch.equal(capture(model, (x,)).gm(x), model(x))
        assert len(captures) == number, f"cut at {cut}"
    capture(model, (x,))
    assert len(captures) == len(cuts) + 1, "the last one was written again"


def test_an_entry_that_is_whole_but_no_graph_is_ignored(folder, captures, caplog):
    caplog.set_level(logging.DEBUG, "numadist")
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    capture(model, (x,))
    (entry,) = entries(folder)
    remember.Store(folder).write(entry.stem, b"no graph")
    assert torch.equal(capture(model, (x,)).gm(x), model(x))
    assert len(captures) == 2
    assert "is ignored: UnpicklingError" in caplog.text


def test_empty_switches_it_off(tmp_path, monkeypatch, captures):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numadist.config, "_config", numadist.config.Config(cache_dir=""))
    for _ in range(2):
        capture(nn.Linear(8, 8), (torch.randn(2, 8),))
    assert len(captures) == 2
    assert not list(tmp_path.iterdir())


RANK = """
import sys, time, torch
from numadist.pipeline.stages import Site, capture, localize
sys.path.insert(0, sys.argv[1])
from zoo import ZOO, make, main_output
count, export = [], torch.export.export
torch.export.export = lambda *a, **k: count.append(1) or export(*a, **k)
model, inputs = make("gpt2"), ZOO["gpt2"].inputs()
gm = capture(model, inputs).gm
with torch.no_grad():
    torch.testing.assert_close(main_output(gm(**inputs)), main_output(model(**inputs)))
print("captures", len(count))
"""


def test_of_processes_that_start_together_one_captures(tmp_path):
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(RANK),
        str(Path(__file__).resolve().parents[1] / "sharding"),
    ]
    environ = {**os.environ, "NUMADIST_CACHE_DIR": str(tmp_path / "cache")}
    ranks = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(rank.communicate()[0].strip() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert said == ["captures 0", "captures 0", "captures 1"]


class Table(nn.Module):
    """Forward makes a constant that is too large to be told from weights."""

    def forward(self, x):
        return x + torch.tensor(list(range(5000)))


def test_nobody_waits_for_a_graph_that_cannot_be_kept(folder, captures, caplog):
    caplog.set_level(logging.DEBUG, "numadist")
    x = torch.randn(5000)
    capture(Table(), (x,))
    assert "the graph of Table is not remembered: lifted_tensor_0 is neither the model's own" in caplog.text
    (entry,) = entries(folder)
    with remember.Store(folder).claimed(entry.stem, 1):  # waiting for it would take minutes
        assert torch.equal(capture(Table(), (x,)).gm(x), Table()(x))
    assert len(captures) == 2


class Fails(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_captured_says_so_every_time(folder, captures):
    for _ in range(2):
        with pytest.raises(ShardError, match="cannot be captured"):
            capture(Fails(), (torch.randn(2),))
    assert len(captures) == 2


def test_a_process_does_not_wait_forever_for_another(folder):
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    name = remember._key(model, (x,), None, False)
    called = []

    def fresh():
        called.append(1)
        return torch.fx.symbolic_trace(model)

    with remember.Store(folder).claimed(name, 1):
        remember.remembered(fresh, model, (x,), patience_s=0.05)
    assert called == [1]
