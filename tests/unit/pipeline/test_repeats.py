"""Repeated parts are found by structure, and their calls in order compute what the whole graph computes."""

import operator

import pytest
import torch
from torch.fx import GraphModule, Interpreter

pytest.importorskip("transformers", reason="needs the extra `models`")

import transformers

from numadist import models
from numadist.generation.step import capture_step
from numadist.graph import query
from numadist.graph.repeats import divide
from numadist.pipeline.stages import capture


def run_divided(gm: GraphModule, inputs):
    """The graph by its calls."""
    division = divide(gm)
    values = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True))

    def value(node):
        return operator.attrgetter(node.target)(gm) if node.op == "get_attr" else values[node]

    for node in division.numbers:
        values[node] = node.target(*(value(a) if isinstance(a, torch.fx.Node) else a for a in node.args))
    for call in division.calls:
        results = Interpreter(division.parts[call.part]).run(*map(value, call.inputs))
        values.update(zip(call.outputs, results, strict=True))
    output = next(iter(reversed(gm.graph.nodes)))
    return division, [value(o) for o in output.all_input_nodes]


def step_inputs(step, rows=2, tokens=5, slots=32):
    ids = torch.randint(100, (rows, tokens), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(tokens).repeat(rows, 1)

    def kv(size):
        return [torch.zeros(rows, k.num_heads, slots, getattr(k, size), dtype=k.dtype) for k in step.layers]

    return ids, positions, positions.clone(), kv("key_size"), kv("value_size")


def check_step(model):
    step = capture_step(model)
    inputs = step_inputs(step)
    truth = step.gm(*inputs)
    *small, keys, values = step_inputs(step)
    division, (seen,) = run_divided(step.gm, [*small, *keys, *values])
    torch.testing.assert_close(seen, truth, rtol=0, atol=0)
    for ours, theirs in zip((*keys, *values), (*inputs[3], *inputs[4]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return division


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_a_layer_is_one_part_however_many_there_are(name, layers):
    option = "n_layer" if name == "gpt2-tiny" else "num_hidden_layers"
    division = check_step(models.build(name, **{option: layers}))
    assert [call.part for call in division.calls] == [0, *[1] * layers, 2]
    assert all(len(call.outputs) == 1 for call in division.calls[1:]), "only the residual leaves a layer"


def test_layers_of_two_kinds_that_compute_alike_are_one_part():
    """Sliding and full attention differ in the mask and rotary table they are given, not in what they do."""
    options = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    model = models.build("gemma3-270m", **options, layer_types=kinds, vocab_size=512, sliding_window=7)
    division = check_step(model)
    assert [call.part for call in division.calls] == [0, *[1] * 6, 2]


def test_dense_and_expert_layers_are_two_parts():
    config = transformers.Qwen2MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0, 1, 3],
    )
    torch.manual_seed(0)
    division = check_step(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert [call.part for call in division.calls][1:-1] == [1, 1, 2, 1, 2, 2]


class Different(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8 * i, 8 * i + 8) for i in range(1, 5)))

    def forward(self, x):
        return self.layers(x).softmax(-1)


class Alike(torch.nn.Module):
    """Layers that share what no weight decides, and one weight."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.shared = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        scale = torch.arange(8.0).cos()
        first = x
        for layer in self.layers:
            x = torch.relu(layer(x) * scale + self.shared) + first.sum(-1, keepdim=True)
        return x[:, 1:]


@pytest.mark.parametrize(("module", "calls"), [(Different, [0]), (Alike, [0, 1, 1, 1, 1, 2])])
def test_small_modules(module, calls):
    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(3, 8)
    captured = capture(model, x)
    captured.gm.graph.erase_node(next(n for n in captured.gm.graph.nodes if n.op == "call_module"))
    division, (seen,) = run_divided(captured.gm, [x])
    assert [call.part for call in division.calls] == calls
    torch.testing.assert_close(seen, model(x), rtol=0, atol=0)


def test_a_graph_with_other_calls_is_refused():
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="call_module 0"):
        divide(traced)


class SplittingLayer(torch.nn.Module):
    """Has lists of tensors three times, so that getitems come in a rhythm of their own."""

    def __init__(self):
        super().__init__()
        sizes = {"qkv": (8, 24), "out": (8, 8), "up": (8, 12), "down": (12, 8)}
        self.linears = torch.nn.ModuleDict(
            {name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()}
        )
        self.scales = torch.nn.ParameterList(torch.rand(8) for _ in range(2))

    def forward(self, x, y):
        q, k, v = torch.split(self.linears["qkv"](x), [8, 8, 8], -1)
        x, y = self.joined(self.linears["out"](torch.softmax(q * k, -1) * v), y, self.scales[0])
        return self.joined(self.linears["down"](torch.relu(self.linears["up"](x))), y, self.scales[1])

    def joined(self, x, y, scale):
        y, x = torch.split(torch.cat([x + y, torch.sigmoid(x + y) * scale], -1), [8, 8], -1)
        return x, y


class SplittingModel(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(SplittingLayer() for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 5)

    def forward(self, y):
        x = self.norm(y)
        for layer in self.layers:
            x, y = layer(x, y)
        return self.head(x)


def test_no_list_of_tensors_leaves_a_part():
    """Getitems mark candidates for cuts as all nodes do, but behind their list."""
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    gm = torch.export.export(SplittingModel(6), (x,)).module()
    division, (seen,) = run_divided(gm, [x])
    torch.testing.assert_close(seen, gm(x), rtol=0, atol=0)
    left = [query.value(node) for call in division.calls for node in call.outputs]
    assert all(isinstance(value, torch.Tensor) for value in left), [type(value).__name__ for value in left]
    assert len(division.parts) < len(division.calls), "layers are found still"
