"""Other runtimes a user would pick instead, where they are installed."""

import logging
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from numadist import models
from numadist.compare.variants import CannotRun
from numadist.errors import NumadistError

Run = Callable[..., torch.Tensor]


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


def _exported(
    model: torch.nn.Module, inputs: dict[str, Any]
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """(program, names of the tensors it takes)."""
    wrapped = _LastPosition(model, inputs)
    with torch.no_grad():
        program = torch.export.export(wrapped, tuple(inputs[name] for name in wrapped.names), strict=False)
    return program, wrapped.names


def openvino(model: torch.nn.Module, inputs: dict[str, Any], num_threads: int) -> Run:
    """The model in OpenVINO's CPU plug-in, in the precision of its weights."""
    import openvino as ov

    program, names = _exported(model, inputs)
    options = {
        "INFERENCE_NUM_THREADS": num_threads,
        "INFERENCE_PRECISION_HINT": "bf16" if _dtype(model) == torch.bfloat16 else "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = ov.Core().compile_model(ov.convert_model(program), "CPU", options)

    def run(**given: Any) -> torch.Tensor:
        return torch.from_numpy(compiled([given[name] for name in names])[0])

    return run


def onnxruntime(model: torch.nn.Module, inputs: dict[str, Any], num_threads: int) -> Run:
    """The model in ONNX Runtime's CPU provider. Raises: CannotRun unless it is in fp32."""
    if _dtype(model) != torch.float32:
        raise CannotRun("ONNX Runtime has no bfloat16 kernels for CPUs; see --dtype float32")
    import onnxruntime as ort

    program, names = _exported(model, inputs)
    logging.getLogger("torch.onnx").setLevel(
        logging.ERROR
    )  # it warns of every package that it could do without
    with tempfile.TemporaryDirectory(prefix="numadist-") as folder:
        file = Path(folder) / "model.onnx"
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
        assert exported is not None
        exported.save(file, external_data=True)  # a single file holds 2 GB
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
        # Its threads would go on spinning while other variants are timed.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    fed = [i.name for i in session.get_inputs()]

    def run(**given: Any) -> torch.Tensor:
        (last,) = session.run(None, {to: given[name].numpy() for to, name in zip(fed, names, strict=True)})
        return torch.from_numpy(last)

    return run


class LlamaCpp:
    """The model in llama.cpp, in a process of its own: llama-cpp-python may live in another interpreter.

    Weights are in the dtype of the model, keys and values in float16 (float32 with float32), llama.cpp's default.
    Raises: CannotRun for a model that we write no file of.
    """

    def __init__(self, model: torch.nn.Module, inputs: dict[str, Any], num_threads: int, python: str):
        from numadist.compare.gguf_file import write_gguf

        self.batch, self.tokens = inputs["input_ids"].shape
        with tempfile.TemporaryDirectory(prefix="numadist-") as folder:
            file = Path(folder) / "model.gguf"
            write_gguf(model, file)
            kind = "f16" if _dtype(model) == torch.bfloat16 else "f32"
            numbers = map(str, (self.batch, self.tokens, num_threads))
            # Not as a script: its folder would come first among those it imports from.
            start = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
            script = Path(__file__).with_name("llama_context.py")
            self._process = subprocess.Popen(
                [python, "-c", start, str(script), str(file), kind, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._vocabulary = int(np.frombuffer(self._read(4), np.int32)[0])

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """Logits of the last position, [B, vocabulary]."""
        assert self._process.stdin is not None
        self._process.stdin.write(input_ids.numpy().astype(np.int32).tobytes())
        self._process.stdin.flush()
        logits = np.frombuffer(self._read(4 * self.batch * self._vocabulary), np.float32)
        return torch.from_numpy(logits.reshape(self.batch, self._vocabulary).copy())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self, num_bytes: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(num_bytes)
        if len(data) < num_bytes:
            code = self._process.wait()
            raise NumadistError(f"llama.cpp ended with exit code {code}; see its output above")
        return data


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
