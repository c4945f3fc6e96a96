"""The unsharded model in a process of its own, to hold a sharded one against."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from numadist.compare.model_under_test import ModelUnderTest
from numadist.compare.worker import Answer, Worker

if TYPE_CHECKING:
    import torch


class UnshardedProcess:
    """One process that runs a model whole, with a thread on each of the CPUs and no memory policy.

    model: a name of numadist.models, or `module:function`. compile: torch.compile with weights packed once.
    Rank 0 of a job can drive it between its own forwards, A B A B. Close it when done.
    """

    def __init__(self, model: str, cpus: Iterable[int], *, dtype: str = "float32", compile: bool = False):
        variant = "compile" if compile else "eager"
        self._worker = Worker(variant, ModelUnderTest(model, dtype), sorted(cpus))

    def forward(self, input_ids: "torch.Tensor", times: int = 1) -> Answer:
        """Seconds of `times` forwards of tokens [B, S], and the logits of each row's last position, [B, V].

        Raises: NumadistError with the process's own traceback.
        """
        batch, seq = input_ids.shape
        return self._worker.forward(batch, seq, times, input_ids.numpy())

    def close(self) -> None:
        """End the process."""
        self._worker.close()
