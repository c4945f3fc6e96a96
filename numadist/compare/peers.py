"""Other runtimes a user would pick instead, where they are installed."""

from collections.abc import Callable
from typing import Any

import torch

from numadist import models


class _LastPosition(torch.nn.Module):
    """The model with everything but its tensors bound, answering the last position only, in fp32.

    OpenVINO cannot take inputs that are no tensors, and hands bf16 outputs to NumPy as if they were fp16.
    """

    def __init__(self, model: torch.nn.Module, inputs: dict[str, Any]):
        super().__init__()
        self.model = model
        self.names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        self.constants = {name: value for name, value in inputs.items() if name not in self.names}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = dict(zip(self.names, tensors, strict=True))
        return models.last_position(self.model(**inputs, **self.constants)).float()


def openvino(model: torch.nn.Module, inputs: dict[str, Any], num_threads: int) -> Callable[..., torch.Tensor]:
    """The model in OpenVINO's CPU plug-in, in the precision of its weights."""
    import openvino as ov

    wrapped = _LastPosition(model, inputs)
    tensors = tuple(inputs[name] for name in wrapped.names)
    with torch.no_grad():
        program = torch.export.export(wrapped, tensors, strict=False)
    precision = "bf16" if next(model.parameters()).dtype == torch.bfloat16 else "f32"
    options = {
        "INFERENCE_NUM_THREADS": num_threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = ov.Core().compile_model(ov.convert_model(program), "CPU", options)

    def run(**given: Any) -> torch.Tensor:
        return torch.from_numpy(compiled([given[name] for name in wrapped.names])[0])

    return run
