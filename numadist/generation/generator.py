"""`numadist.generate` and `numadist.Generator`: Hugging Face generate's arguments, over all ranks."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from numadist.errors import CommError, GenerateError
from numadist.generation.engine import Engine, Policy, Request
from numadist.generation.peers import Peers, peers_of
from numadist.generation.runner import Runner
from numadist.generation.sampling import Sampling
from numadist.generation.step import CapturedStep
from numadist.kernels import int8
from numadist.log import get_logger
from numadist.sharding.schema import Schema

log = get_logger(__name__)

# Slots of a row unless the caller or the model's own limit says otherwise.
DEFAULT_MAX_LENGTH = 2048

OnToken = Callable[[int, int], None]


class Generator:
    """A causal language model split over the ranks, with its KV tensors; graphs are made once and kept.

    Every rank makes it and calls `generate` alike. Arguments of a call count on rank 0, which decides; all ranks get
    the same tokens. Without a process group one rank does everything.

    max_batch_size: rows that run at a time; more prompts wait their turn. max_length: tokens of a row, prompt and new
    ones together. Both fix the memory of the KV tensors. group, schema, weights: as numadist.shard takes them.
    compile: torch.compile the graphs, with weights packed once for reading prompts and for decoding.
    quantization: "int8" decodes on int8 weights with a scale per output (weight-only), for compiled bf16 models.
    Prompts are still read with the bf16 weights, so a rank holds 1.5 times the bytes.
    Raises: GenerateError, ShardError for a model that cannot be captured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_batch_size: int = 8,
        max_length: int | None = None,
        group: dist.ProcessGroup | None = None,
        schema: Schema | None = None,
        weights: str | Path | None = None,
        compile: bool = False,
        quantization: Literal["int8"] | None = None,
    ):
        self._make(
            model,
            None,
            peers_of(group),
            max_batch_size=max_batch_size,
            max_length=max_length,
            schema=schema,
            weights=weights,
            compile=compile,
            quantization=quantization,
        )

    @classmethod
    def of_captured(
        cls, model: torch.nn.Module, step: CapturedStep, peers: Peers, **options: Any
    ) -> "Generator":
        """For a step captured before, which this takes over, and peers that are no process group.

        options: those of the constructor but for group.
        """
        made = cls.__new__(cls)
        made._make(model, step, peers, **options)
        return made

    def _make(
        self,
        model: torch.nn.Module,
        step: CapturedStep | None,
        peers: Peers,
        max_batch_size: int = 8,
        max_length: int | None = None,
        schema: Schema | None = None,
        weights: str | Path | None = None,
        compile: bool = False,
        quantization: str | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise GenerateError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self.peers = peers
        config: Any = model.config
        limit = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
        self.max_length = max_length if max_length is not None else min(limit, DEFAULT_MAX_LENGTH)
        if not 2 <= self.max_length <= limit:
            raise GenerateError(
                f"max_length must be from 2 to the model's {limit} positions, got {self.max_length}"
            )
        self.defaults = getattr(model, "generation_config", None)
        self.runner = Runner(
            model,
            peers,
            max_rows=max_batch_size,
            max_tokens=self.max_length,
            schema=schema,
            weights=weights,
            compile=compile,
            int8=_wants_int8(model, quantization, compile),
            step=step,
        )

    @property
    def rank(self) -> int:
        """Of this process among those that generate together."""
        return self.peers.rank

    @property
    def num_ranks(self) -> int:
        return self.peers.num_ranks

    @property
    def schema(self) -> Schema:
        return self.runner.schema

    @property
    def local_bytes(self) -> int:
        """Bytes of weights this rank holds."""
        return self.runner.local_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values this rank holds, for all rows and slots."""
        return self.runner.kv.num_bytes

    def kv_page_nodes(self) -> dict[int, int]:
        """{node: pages} of this rank's keys and values, asked of the kernel."""
        return self.runner.kv.page_nodes()

    def engine(self, policy: Policy = Policy.PREFILL_FIRST, **options: Any) -> Engine:
        """For servers, on rank 0: a queue of requests. The other ranks call `follow` meanwhile; `end` lets them go."""
        return Engine(self.runner, policy, **options)

    def follow(self) -> None:
        """Other ranks: serve rank 0's engine until it ends. Raises: GenerateError if it ended with an error."""
        if self.runner.follow() != 0:
            raise GenerateError("rank 0 stopped generating with an error; its own output has the reason")

    def end(self, failed: bool = False) -> None:
        """Rank 0: let the others return from `follow`."""
        self.runner.end(int(failed))

    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int = 0,
        max_time: float | None = None,
        on_token: OnToken | None = None,
    ) -> Any:
        """Continue every prompt; returns prompts with their continuations, alike on every rank.

        input_ids: [B, T], padded on any side where attention_mask is 0, or lists of token ids of any lengths. Returns
        [B, T + N] padded on the right with pad_token_id, or lists.
        eos_token_id: token or tokens that end a row; None takes the model's own, () none.
        max_time: seconds, after which rows end with what they have.
        on_token: called on rank 0 as on_token(row, token); what it raises ends the call on every rank.
        Raises: GenerateError for a prompt that does not fit, and on other ranks if rank 0 fails.
        """
        how = Sampling(do_sample, temperature, top_k, top_p)
        prompts = _prompts(input_ids, attention_mask)
        stop_ids = self._stop_ids(eos_token_id)
        if how.num_candidates is None and self.num_ranks > 1 and self.rank == 0:
            log.warning(
                "top_k=%d: every rank sends all its logits at every step; up to 64 it sends top_k", top_k
            )
        new = self._run(prompts, max_new_tokens, how, stop_ids, seed, max_time, on_token)
        if not isinstance(input_ids, Tensor):
            return [[*prompt, *tokens] for prompt, tokens in zip(prompts, new, strict=True)]
        longest = max(map(len, new))
        out = torch.full((len(new), longest), self._pad_id(pad_token_id, stop_ids))
        for row, tokens in zip(out, new, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return torch.cat([input_ids, out], dim=1)

    def _run(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        how: Sampling,
        stop_ids: frozenset[int],
        seed: int,
        max_time: float | None,
        on_token: OnToken | None,
    ) -> list[list[int]]:
        """New tokens of every prompt, decided on rank 0 and sent to all."""
        if self.rank != 0:
            self.follow()
            return self._share([[0] * max_new_tokens for _ in prompts])
        engine = Engine(self.runner, seed=seed)
        deadline = None if max_time is None else engine.clock() + max_time
        requests = [
            Request(
                prompt,
                max_new_tokens,
                how,
                stop_ids,
                functools.partial(on_token, row) if on_token is not None else None,
                deadline,
            )
            for row, prompt in enumerate(prompts)
        ]
        try:
            for request in requests:
                engine.submit(request)
            engine.run()
        except BaseException:
            with contextlib.suppress(CommError):  # of a group that is already broken
                self.end(failed=True)
            raise
        self.end()
        return self._share([request.tokens for request in requests])

    def _share(self, new: list[list[int]]) -> list[list[int]]:
        """Rank 0's tokens on every rank; the others pass lists of the largest size."""
        width = 1 + max(len(tokens) for tokens in new)
        size = torch.tensor([width])
        self.peers.broadcast(size)
        table = torch.zeros(len(new), int(size), dtype=torch.int64)
        if self.rank == 0:
            for row, tokens in zip(table, new, strict=True):
                row[: 1 + len(tokens)] = torch.tensor([len(tokens), *tokens])
        self.peers.broadcast(table)
        return [row[1 : 1 + row[0]] for row in table.tolist()]

    def _stop_ids(self, eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
        if eos_token_id is None:
            eos_token_id = getattr(self.defaults, "eos_token_id", None)
        if eos_token_id is None:
            return frozenset()
        return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)

    def _pad_id(self, pad_token_id: int | None, stop_ids: frozenset[int]) -> int:
        own = getattr(self.defaults, "pad_token_id", None)
        return next((i for i in (pad_token_id, own, *sorted(stop_ids)) if i is not None), 0)


def _wants_int8(model: torch.nn.Module, quantization: str | None, compile: bool) -> bool:
    """Whether to quantize. Warns where this machine or the model cannot. Raises: GenerateError."""
    if quantization is None:
        return False
    if quantization != "int8":
        raise GenerateError(f"quantization must be 'int8' or None, got {quantization!r}")
    if not compile:
        raise GenerateError("quantization='int8' needs compile=True: it is a graph of its own for decoding")
    if not int8.takes(2, next(model.parameters()).dtype):
        log.warning(
            "quantization='int8' is left out: it needs a bfloat16 model and a CPU with AVX512-BF16 and AVX512-VBMI"
        )
        return False
    return True


def _prompts(input_ids: Tensor | Sequence[Sequence[int]], attention_mask: Tensor | None) -> list[list[int]]:
    """Token ids of every prompt without padding. Raises: GenerateError for inputs of the wrong form."""
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise GenerateError(
                "attention_mask goes with a tensor of input_ids; lists have their own lengths"
            )
        prompts = [list(map(int, prompt)) for prompt in input_ids]
    else:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if input_ids.dim() != 2 or mask.shape != input_ids.shape:
            raise GenerateError(
                f"input_ids must be [B, T] and attention_mask alike, got {list(input_ids.shape)} and {list(mask.shape)}"
            )
        prompts = [row[kept].tolist() for row, kept in zip(input_ids, mask.bool(), strict=True)]
    if not prompts:
        raise GenerateError("no prompts")
    return prompts


def generate(
    model: torch.nn.Module,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    group: dist.ProcessGroup | None = None,
    max_new_tokens: int = 20,
    **options: Any,
) -> Any:
    """Split `model` over the ranks and continue the prompts; options are those of Generator.generate.

    For one call: a second one captures the model again. Keep a numadist.Generator to generate more than once.
    """
    prompts = _prompts(input_ids, options.get("attention_mask"))
    longest = max(map(len, prompts)) + max_new_tokens
    generator = Generator(model, max_batch_size=len(prompts), max_length=longest, group=group)
    return generator.generate(input_ids, max_new_tokens=max_new_tokens, **options)
