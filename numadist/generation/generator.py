"""`numadist.generate` and `numadist.Generator`: Hugging Face generate's arguments, over all ranks."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from numadist.errors import CommError, GenerateError
from numadist.generation.asked import Asked, read
from numadist.generation.engine import Engine, Policy
from numadist.generation.peers import Peers, peers_of
from numadist.generation.pretrained import open_pretrained
from numadist.generation.runner import Runner
from numadist.generation.step import CapturedStep
from numadist.log import get_logger
from numadist.pipeline.quantize import Quantization, check_quantization
from numadist.sharding.schema import Schema

log = get_logger(__name__)

# Slots of a row unless the caller or the model's own limit says otherwise.
DEFAULT_MAX_LENGTH = 2048

RANK_0_FAILED = "rank 0 stopped generating with an error; its own output has the reason"

OnToken = Callable[[int, int], None]


class Generator:
    """A causal language model split over the ranks, with its KV tensors; graphs are made once and kept.

    Every rank makes it alike and calls `generate`. Arguments of a call count on rank 0 alone; all ranks get its
    answer. Without a process group one rank does everything.

    max_batch_size: rows that run at a time; more prompts wait their turn. max_length: tokens of a row, prompt and new
    ones together. Both fix the memory of the KV tensors. group, schema, weights: as numadist.shard takes them.
    compile: torch.compile the graphs, with weights packed once for reading prompts and for decoding.
    quantization: "auto" computes on the codes of a quantized file as they are; None widens them. "int8" and "int4"
    round the layers and tables of any model while they are loaded, by groups of 32 inputs. Products with codes round
    their inputs to 8 bits too, as llama.cpp does.
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
        quantization: Quantization | None = None,
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
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype | None = None,
        quantization: Quantization | None = "auto",
        **options: Any,
    ) -> "Generator":
        """Of a folder as Hugging Face saves models, or a .gguf file; each rank reads its slices of the weights alone.

        dtype: of activations, and of weights that are no codes; None takes what a folder's config says, float32 for a
        .gguf file. options: those of the constructor but for weights. Its tokenizer is AutoTokenizer's of the place.
        Raises: GenerateError for a path that holds no causal language model in a format that numadist reads.
        """
        found = open_pretrained(path, dtype)
        return cls(found.model, weights=found.weights, quantization=quantization, **options)

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
        quantization: Quantization | None = None,
    ) -> None:
        check_quantization(quantization)
        if max_batch_size < 1:
            raise GenerateError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self.peers, self.quantization = peers, quantization
        config: Any = model.config
        limit = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
        self.max_length = max_length if max_length is not None else min(limit, DEFAULT_MAX_LENGTH)
        if not 2 <= self.max_length <= limit:
            raise GenerateError(
                f"max_length must be from 2 to the model's {limit} positions, got {self.max_length}"
            )
        # Read at every call. The model itself is not kept: its weights may go.
        self._configs = model.config, getattr(model, "generation_config", None)
        # A model without memory for its weights leaves no garbage worth looking for.
        with _collector_paused() if weights is not None else contextlib.nullcontext():
            self.runner = Runner(
                model,
                peers,
                max_rows=max_batch_size,
                max_tokens=self.max_length,
                schema=schema,
                weights=weights,
                compile=compile,
                quantization=quantization,
                step=step,
            )

    @property
    def rank(self) -> int:
        """Of this process among those that generate together."""
        return self.peers.rank

    @property
    def num_ranks(self) -> int:
        """Ranks that generate together."""
        return self.peers.num_ranks

    @property
    def schema(self) -> Schema:
        """The decisions by which the model is split."""
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
            raise GenerateError(RANK_0_FAILED)

    def end(self, failed: bool = False) -> None:
        """Rank 0: let the others return from `follow`."""
        self.runner.end(int(failed))

    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        *,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        tokenizer: Any = None,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Iterable[int] | Tensor | None = None,
        pad_token_id: int | None = None,
        seed: int = 0,
        max_time: float | None = None,
        on_token: OnToken | None = None,
        **fields: Any,
    ) -> Any:
        """Continue every prompt; returns prompts with their continuations, alike on every rank.

        input_ids: [B, T], padded on any side where attention_mask is 0, or lists of token ids of any lengths. Returns
        [B, T + N] padded on the right with pad_token_id, or lists. Without a mask, pads are told by pad_token_id.
        generation_config: fields for this call; arguments win over it, and it over the model's own. fields: further
        ones by Hugging Face's names. What is in none of them is Hugging Face's default: greedy, 20 new tokens.
        eos_token_id: token or tokens that end a row; None takes the config's own, () none.
        tokenizer: for stop_strings. max_time: seconds, after which rows end with what they have.
        on_token: called on rank 0 as on_token(row, token); what it raises ends the call on every rank.
        Raises: GenerateError for a prompt that does not fit or a field that numadist does not have, TokenIdError for a
        token outside the vocabulary; GenerateError on other ranks if rank 0 fails.
        """
        if self.rank != 0:
            self.follow()
            return self._share(None)
        fields |= {
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "max_time": max_time,
        }
        try:
            asked = read(*self._configs, input_ids, attention_mask, generation_config, tokenizer, fields)
            new = self._run(asked, seed, on_token)
        except BaseException:
            with contextlib.suppress(CommError):  # of a group that is already broken
                self.end(failed=True)
            raise
        self.end()
        if not isinstance(input_ids, Tensor):
            return self._share(
                [[*prompt, *tokens] for prompt, tokens in zip(asked.prompts, new, strict=True)]
            )
        out = torch.full((len(new), max(map(len, new))), asked.options.pad_token_id or 0)
        for row, tokens in zip(out, new, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return self._share(torch.cat([input_ids, out], dim=1))

    def _run(self, asked: Asked, seed: int, on_token: OnToken | None) -> list[list[int]]:
        """Rank 0: new tokens of every prompt."""
        how = asked.options.sampling
        if how.num_candidates is None and self.num_ranks > 1:
            log.warning(
                "top_k=%d: every rank sends all its logits at every step; up to 64 it sends top_k", how.top_k
            )
        engine = Engine(self.runner, seed=seed)
        max_time = asked.options.max_time
        requests = asked.requests(on_token, None if max_time is None else engine.clock() + max_time)
        for request in requests:
            engine.submit(request)
        engine.run()
        return [request.tokens for request in requests]

    def _share(self, answer: Any) -> Any:
        """Rank 0's answer on every rank: a tensor of rows, or lists."""
        if self.num_ranks == 1:
            return answer
        rows = answer.tolist() if isinstance(answer, Tensor) else answer or []
        sizes = torch.tensor([isinstance(answer, Tensor), len(rows), max(map(len, rows), default=0)])
        self.peers.broadcast(sizes)
        is_tensor, num_rows, width = sizes.tolist()
        table = torch.zeros(num_rows, 1 + width, dtype=torch.int64)
        for place, row in zip(table, rows, strict=self.rank == 0):
            place[: 1 + len(row)] = torch.tensor([len(row), *row])
        self.peers.broadcast(table)
        if self.rank == 0:
            return answer
        return table[:, 1:].clone() if is_tensor else [row[1 : 1 + row[0]] for row in table.tolist()]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Graphs are millions of objects that stay: Python would go through all of them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def generate(
    model: torch.nn.Module,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Any:
    """Split `model` over the ranks and continue the prompts; options are those of Generator.generate.

    For one call: a second one captures the model again. Keep a numadist.Generator to generate more than once.
    """
    peers = peers_of(group)
    size = torch.zeros(2, dtype=torch.int64)  # rows, and tokens of the longest
    try:
        if peers.rank == 0:
            size = torch.tensor(_size(model, input_ids, **options))
    finally:
        peers.broadcast(size)
    rows, longest = size.tolist()
    if not rows:
        raise GenerateError(RANK_0_FAILED)
    generator = Generator(model, max_batch_size=rows, max_length=longest, group=group)
    return generator.generate(input_ids, **options)


def _size(
    model: torch.nn.Module,
    input_ids: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    seed: int = 0,
    on_token: OnToken | None = None,
    **fields: Any,
) -> tuple[int, int]:
    """Rows, and tokens of the longest, of a call of generate."""
    configs = model.config, getattr(model, "generation_config", None)
    asked = read(*configs, input_ids, attention_mask, generation_config, tokenizer, fields)
    return len(asked.prompts), asked.longest
