"""The worker's end of the pipe: requests answered one after the other, one shape's model at a time."""

import gc
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.variants import CannotRun

if TYPE_CHECKING:
    import numpy as np


def connect(address: str) -> Connection:
    """The harness's end, from a worker."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        return Connection(sock.detach())


def serve(pipe: Connection, model: Any) -> None:
    """Answer requests until the harness hangs up. model takes what Worker.forward does, returns an Answer's fields."""
    pipe.send(("ok", "ready"))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", model(*request)))
        except CannotRun as limit:
            pipe.send(("cannot", str(limit)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


class OneShape:
    """A variant's model for one shape at a time: what the last shape had compiled and packed is freed first.

    make(model, inputs): what to call with the inputs instead of the model.
    keeps_model: the unsharded model is loaded once; otherwise anew for every shape, and freed when `make` is done.
    """

    def __init__(
        self, subject: ModelUnderTest, make: Callable[[Any, dict[str, Any]], Any], keeps_model: bool = True
    ):
        self.subject, self.make, self.keeps_model = subject, make, keeps_model
        self.shape: tuple[int, int] | None = None
        self.kept: Any = None
        self.run: Any = None
        self.inputs: dict[str, Any] = {}

    def __call__(
        self, batch: int, seq: int, input_ids: "np.ndarray | None" = None
    ) -> tuple[Any, dict[str, Any]]:
        """What runs this shape, and its inputs."""
        import torch

        if self.shape != (batch, seq):
            self._drop()
            model, self.inputs = self.subject.load(batch, seq, self.kept)
            if self.keeps_model:
                self.kept = model
            self.run = self.make(model, self.inputs)
            self.shape = (batch, seq)
        given = {} if input_ids is None else {"input_ids": torch.from_numpy(input_ids)}
        return self.run, {**self.inputs, **given}

    def _drop(self) -> None:
        import torch

        if hasattr(self.run, "close"):  # threads or a process of its own
            self.run.close()
        self.shape = self.run = None
        torch.compiler.reset()  # compiled graphs hold packed weights
        gc.collect()


def timed(
    run: Any, inputs: Mapping[str, Any], times: int, before: Callable[[], None] = lambda: None
) -> tuple[list[float], "np.ndarray"]:
    """Seconds of each forward, and the last position's answer [B, V]. before: runs untimed before each."""
    import torch

    from numadist import models

    seconds = []
    with torch.no_grad():
        for _ in range(times):
            before()
            begin = time.perf_counter()
            outputs = run(**inputs)
            seconds.append(time.perf_counter() - begin)
    return seconds, models.last_position(outputs).float().numpy()
