"""A peer of decode.py: OpenVINO's CPU plug-in over a stateful model, one process, all cores.

The step takes past keys and values and returns them longer by one; MakeStateful turns the pairs into states, and the
plug-in fuses state and attention. States are filled from Hugging Face's prefill before every round, untimed.
"""

import inspect
from collections.abc import Iterator

import numpy as np
import openvino as ov
import openvino.opset15 as opset
import torch
from decode_protocol import serve
from openvino._offline_transformations import apply_make_stateful_transformation
from torch.export import Dim
from transformers import DynamicCache
from transformers.cache_utils import Cache

from numadist import models


class Growing(Cache):
    """Past keys and values of every layer, in turn; `grown`: the same with the new token's.

    The plug-in fuses attention with a state only behind a gather of beams, so there is one that changes nothing.
    """

    def __init__(self, past: list[torch.Tensor], beams: torch.Tensor):
        super().__init__(layers=[])
        self.past, self.beams, self.grown = past, beams, list(past)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        for i, new in ((2 * layer_idx, key_states), (2 * layer_idx + 1, value_states)):
            self.grown[i] = torch.cat([self.past[i].index_select(0, self.beams), new], dim=2)
        return self.grown[2 * layer_idx], self.grown[2 * layer_idx + 1]


class Step(torch.nn.Module):
    """Next tokens [B] and longer keys and values [B, H, past + 1, D], from tokens, positions [B, 1] and past ones."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.cache_name = cache_name(model)

    def forward(self, input_ids, position_ids, beams, past):
        cache = Growing(past, beams)
        rows, seen = input_ids.shape[0], past[0].shape[2] + 1
        mask = torch.ones(rows, 1, 1, seen, dtype=torch.bool)
        inputs = {"position_ids": position_ids, "attention_mask": mask, self.cache_name: cache}
        outputs = self.model(input_ids, **inputs, use_cache=True)
        return outputs.logits[:, -1].argmax(-1), *cache.grown


class Decoder:
    """Holds a context and decodes from it again and again."""

    def __init__(self, setting: dict):
        threads = len(setting["cpus"])
        torch.set_num_threads(threads)
        model = models.build(setting["model"], getattr(torch, setting["dtype"]))
        prompts = torch.tensor(setting["prompts"])
        self.context = prompts.shape[1]
        cache = DynamicCache()
        inputs = {cache_name(model): cache, "use_cache": True, "logits_to_keep": 1}
        logits = model(prompts, **inputs).logits
        self.first = logits[:, -1].argmax(-1)
        past = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        self.past = [_ov_tensor(t) for t in past]
        # Under a limit it takes bf16 for possible still, and then finds no kernel.
        kind = "bf16" if setting["dtype"] == "bfloat16" and not setting["max_isa"] else "f32"
        if kind == "f32":
            self.past = [_ov_tensor(t.float()) for t in past]
        self.request = _compiled(model, past, self.first, kind, threads).create_infer_request()

    def decode(self) -> Iterator[list[int]]:
        for state in self.request.query_state():
            state.state = self.past[int(state.name.partition("past_out")[2])]
        tokens, position = self.first.numpy(), self.context
        beams = np.arange(len(tokens), dtype=np.int32)
        while True:
            yield tokens.tolist()
            positions = np.full((len(tokens), 1), position)
            self.request.infer([tokens[:, None], positions, beams])
            tokens, position = self.request.get_output_tensor(0).data.copy(), position + 1


def cache_name(model: torch.nn.Module) -> str:
    """What this version of transformers calls it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _compiled(model, past, first, kind: str, threads: int) -> ov.CompiledModel:
    length = Dim("past", min=2, max=1 << 20)
    step = Step(model)
    rows = len(first)
    beams = torch.arange(rows, dtype=torch.int32)
    inputs = (first[:, None], torch.full((rows, 1), past[0].shape[2]), beams, past)
    shapes = (None, None, None, [{2: length}] * len(past))
    program = torch.export.export(
        step,
        inputs,
        dynamic_shapes=shapes,
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,  # export cannot prove that 64 n is less than 192 n
    )
    converted = ov.convert_model(program)
    pairs = {}
    for i in range(len(past)):
        converted.inputs[3 + i].set_names({f"past_in{i}"})
        converted.outputs[1 + i].set_names({f"past_out{i}"})
        pairs[f"past_in{i}"] = f"past_out{i}"
    apply_make_stateful_transformation(converted, pairs)
    for op in converted.get_ops():
        if op.get_type_name() == "ReadValue":  # fused, it must know how an empty state looks
            rows, heads, _, size = past[0].shape
            nothing = opset.constant(0.0, op.get_output_element_type(0))
            op.set_arguments([opset.broadcast(nothing, np.array([rows, heads, 0, size]))])
    converted.validate_nodes_and_infer_types()
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": kind,
        "KV_CACHE_PRECISION": kind,  # eight bits unless told
        "PERFORMANCE_HINT": "LATENCY",
    }
    return ov.Core().compile_model(converted, "CPU", options)


def _ov_tensor(t: torch.Tensor) -> ov.Tensor:
    if t.dtype != torch.bfloat16:
        return ov.Tensor(t.contiguous().numpy())
    bits = t.contiguous().view(torch.int16).numpy()  # NumPy has no bfloat16
    return ov.Tensor(bits, ov.Shape(list(t.shape)), ov.Type.bf16)


if __name__ == "__main__":
    with torch.no_grad():
        serve(lambda setting: Decoder(setting).decode, "as the model, keys and values too")
