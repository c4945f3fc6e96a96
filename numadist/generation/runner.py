"""One rank's share of every step: rank 0 says what to run, all ranks run it, rank 0 gets the candidates."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numadist.errors import GenerateError, TokenIdError
from numadist.generation.kv import SLOT_STEP, KvTensors, round_up
from numadist.generation.logits import Edit, edited, pack
from numadist.generation.peers import Peers, local_heads
from numadist.generation.sampling import local_candidates, merge_candidates
from numadist.generation.step import CapturedStep, capture_step
from numadist.graph import query
from numadist.graph.query import aten
from numadist.log import get_logger
from numadist.phases.phase import Phase, phase, switch_phase
from numadist.pipeline.quantize import Quantization
from numadist.pipeline.shard import check_group
from numadist.pipeline.stages import Site, checkpoint_of, localize
from numadist.sharding import rules
from numadist.sharding.build_schema import build_schema
from numadist.sharding.placement import Shard
from numadist.sharding.reasons import warn_left_alone
from numadist.sharding.schema import Schema

log = get_logger(__name__)


class Command(enum.IntEnum):
    """What rank 0 tells the others to do."""

    RUN = 0
    MOVE = 1
    END = 2
    IDLE = 3


@dataclass(frozen=True)
class Vocabulary:
    """This rank's logits: `size` tokens from `first`; the largest part of any rank has `largest`."""

    first: int
    size: int
    largest: int


class Runner:
    """The sharded step of one rank, with its KV tensors.

    Rank 0 calls `run`, `move_row` and `end`; the others call `follow`, which returns at `end`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        peers: Peers,
        *,
        max_rows: int,
        max_tokens: int,
        schema: Schema | None = None,
        weights: str | Path | None = None,
        compile: bool = False,
        quantization: Quantization | None = None,
        step: CapturedStep | None = None,
    ):
        """Split the model over the peers, a collective call. max_tokens: of one row, prompt and new ones together.

        quantization: which weights are codes. step: the model captured before, which this takes over.
        """
        self.peers, self.max_rows, self.max_tokens = peers, max_rows, max_tokens
        self.vocabulary_size = _vocabulary_size(model)
        step = step or capture_step(model)
        self.schema = schema or build_schema(step.captured, peers.num_ranks)
        check_group(self.schema, peers.num_ranks)
        peers.check(self.schema)
        if peers.rank == 0:
            warn_left_alone(self.schema)
        self.kv = KvTensors(
            _kv_shapes(step, self.schema, peers.rank), max_rows, round_up(max_tokens + 1, SLOT_STEP)
        )
        stays = _heads_may_stay(step, self.schema)
        self.vocabulary = _vocabulary(step, self.schema, peers.rank, stays)
        site = Site(peers.rank, local_heads(peers.emitter) if stays else peers.emitter)
        self.part = localize(
            step.captured,
            self.schema,
            site,
            checkpoint_of(weights, model, warn=peers.rank == 0),
            quantization,
        )
        self.local_bytes = self.part.num_bytes
        self._forward: Callable[..., Tensor] = self.part.gm
        if compile:
            self._forward = self.part.compile_step()
        # kind, rows and slots of the step; then of every row: its first position, its number of tokens, its only one
        self._header = torch.zeros(8 + 3 * max_rows, dtype=torch.int64)

    def run(
        self,
        first_row: int,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        count: int | None,
        edits: Sequence[Edit | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """Rank 0: append tokens to rows first_row, first_row + 1, ...; the candidates for what follows, best first.

        starts: number of tokens each row has already. count: as local_candidates takes it. edits: what to change in
        the logits of each row. Returns values and tokens, [B, C] each.
        Raises: GenerateError for a row that becomes too long; what the collectives raise.
        """
        lengths = [len(row) for row in tokens]
        num_tokens = max(lengths)
        num_slots = self.kv.slots_for(max(s + n for s, n in zip(starts, lengths, strict=True)))
        payload = torch.tensor([[0] * (num_tokens - len(row)) + list(row) for row in tokens])
        message = pack(edits) if any(edits) else None
        fields = [Command.RUN, first_row, len(tokens), num_tokens, num_slots, -1 if count is None else count]
        fields.append(0 if message is None else len(message))
        self._send(fields, starts, lengths, [row[0] for row in tokens] if num_tokens == 1 else ())
        if num_tokens > 1:
            self.peers.broadcast(payload)
        if message is not None:
            self.peers.broadcast(message)
        gathered = self._step(
            first_row, payload, torch.tensor(starts), torch.tensor(lengths), num_slots, count, message
        )
        return merge_candidates(gathered, len(tokens))

    def move_row(self, source: int, target: int, num_tokens: int) -> None:
        """Rank 0: row `target` becomes what row `source` is, of which num_tokens slots are filled."""
        self._send([Command.MOVE, source, target, num_tokens])
        self.kv.move_row(source, target, num_tokens)

    def idle(self) -> None:
        """Rank 0: nothing to do, but alive; the others wait no longer than the group's timeout for a command."""
        self._send([Command.IDLE])

    def end(self, status: int = 0) -> None:
        """Rank 0: let the others' `follow` return `status`."""
        self._send([Command.END, status])

    def follow(self) -> int:
        """Other ranks: do what rank 0 says until it ends; returns the status of its `end`."""
        with phase(Phase.PREFILL):  # afterwards this thread has its own number of threads again
            return self._follow()

    def _follow(self) -> int:
        while True:
            self.peers.broadcast(self._header)
            kind, *fields = self._header[:8].tolist()
            if kind == Command.END:
                return int(fields[0])
            if kind == Command.MOVE:
                self.kv.move_row(*fields[:3])
            elif kind == Command.RUN:
                self._follow_step(*fields[:6])

    def _follow_step(
        self, first_row: int, num_rows: int, num_tokens: int, num_slots: int, count: int, num_words: int
    ) -> None:
        starts, lengths, only = self._header[8:].view(3, self.max_rows)[:, :num_rows].clone()
        # A tensor of its own, as on rank 0: an offset into another one would be a new input for the compiler.
        tokens = only[:, None].clone()
        if num_tokens > 1:
            tokens = torch.empty(num_rows, num_tokens, dtype=torch.int64)
            self.peers.broadcast(tokens)
        message = None
        if num_words:
            message = torch.empty(num_words, dtype=torch.int64)
            self.peers.broadcast(message)
        self._step(first_row, tokens, starts, lengths, num_slots, None if count < 0 else count, message)

    def _send(self, fields: Sequence[int], *of_rows: Any) -> None:
        if self.peers.num_ranks == 1:
            return
        header = self._header.numpy()
        header[: len(fields)] = fields
        rows = header[8:].reshape(3, self.max_rows)
        for target, values in zip(rows, of_rows, strict=False):
            target[: len(values)] = values
        self.peers.broadcast(self._header)

    def _step(
        self,
        first_row: int,
        tokens_BT: Tensor,
        starts_B: Tensor,
        lengths_B: Tensor,
        num_slots: int,
        count: int | None,
        message: Tensor | None,
    ) -> Tensor:
        """All ranks: one forward, what the message changes, and the exchange of candidates, [num_ranks, N]."""
        num_rows, num_tokens = tokens_BT.shape
        # The same line the compiled graphs are divided by: Inductor writes the thread count into each.
        switch_phase(Phase.DECODE if num_tokens == 1 else Phase.PREFILL)
        positions_BT, slots_BT = _places(starts_B, lengths_B, num_tokens, num_slots)
        kv = self.kv.view(first_row, num_rows, num_slots)
        half = len(kv) // 2
        with torch.no_grad():
            logits_BV = self._forward(tokens_BT, positions_BT, slots_BT, kv[:half], kv[half:])
            if self.vocabulary.size == 0:
                logits_BV = logits_BV[:, :1].float().fill_(-torch.inf)
            elif message is not None:
                logits_BV = edited(logits_BV, message, self.vocabulary.first)
            vocabulary = self.vocabulary
            return self.peers.all_gather(
                local_candidates(logits_BV, count, vocabulary.first, vocabulary.largest)
            )


def _places(starts_B: Tensor, lengths_B: Tensor, num_tokens: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """Positions and slots of the tokens, [B, T] each; padding goes to the last slot."""
    if num_tokens == 1:
        return starts_B[:, None].clone(), starts_B[:, None].clone()
    order_BT = torch.arange(num_tokens) - (num_tokens - lengths_B)[:, None]
    positions_BT = (starts_B[:, None] + order_BT).clamp_(min=0)
    return positions_BT, positions_BT.masked_fill(order_BT < 0, num_slots - 1)


def _kv_shapes(step: CapturedStep, schema: Schema, rank: int) -> list[tuple[int, int, torch.dtype]]:
    """(heads, size, dtype) of this rank's KV tensors, keys of all layers, then values."""
    placed = {name: shard for block in schema.blocks for name, shard in block.values.items()}
    sizes = ("key_size", "value_size")
    shapes = []
    for names, size in zip(step.kv_inputs(), sizes, strict=True):
        for name, layer in zip(names, step.layers, strict=True):
            whole = (1, layer.num_heads, 1, getattr(layer, size))
            _, heads, _, width = placed.get(name, Shard({})).local_shape(whole, rank)
            shapes.append((heads, width, layer.dtype))
    return shapes


def _vocabulary(step: CapturedStep, schema: Schema, rank: int, stays: bool) -> Vocabulary:
    """This rank's logits. Where every rank gets them whole, rank 0 alone speaks for them."""
    nodes = {n.name: n for n in step.gm.graph.nodes}
    for block in schema.blocks if stays else []:
        for name in block.heads:
            rows = block.params[str(nodes[name].args[1].target)].dims[0]
            ((first, stop),) = rows.cuts[rank]
            return Vocabulary(first, stop - first, rows.local_size(0))
    (logits,) = next(n for n in nodes.values() if n.op == "output").all_input_nodes
    size = int(query.shape(logits)[-1])
    return Vocabulary(0, size if rank == 0 else 0, size)


def _heads_may_stay(step: CapturedStep, schema: Schema) -> bool:
    """The split head's logits reach the output through nothing that looks across the vocabulary."""
    nodes = {n.name: n for n in step.gm.graph.nodes}
    todo = [nodes[name] for block in schema.blocks for name in block.heads]
    found = bool(todo)
    while todo:
        node = todo.pop()
        last = len(query.shape(node)) - 1
        for user in node.users:
            if user.op == "output":
                continue
            along = user.target in {aten.select.int, aten.slice.Tensor} and user.args[1] % (last + 1) != last
            if not along and rules.find_rule(user) not in {rules.pointwise, rules.identity}:
                return False
            todo.append(user)
    return found


def _vocabulary_size(model: torch.nn.Module) -> int:
    """How many tokens the model can read."""
    of: Any = model
    table = of.get_input_embeddings()
    return int(getattr(table, "num_embeddings", None) or of.config.get_text_config().vocab_size)


def check_prompt(prompt: Sequence[int], max_new_tokens: int, max_tokens: int, vocabulary_size: int) -> None:
    """Raises: GenerateError for a prompt that is empty or leaves no room, TokenIdError for a token that is none."""
    if not prompt:
        raise GenerateError("a prompt has no token; give it at least one, e.g. the model's bos token")
    if (outside := next((t for t in prompt if not 0 <= t < vocabulary_size), None)) is not None:
        raise TokenIdError(
            f"token {outside} at place {list(prompt).index(outside)} of a prompt is outside the model's vocabulary of "
            f"{vocabulary_size}: ids are from 0 to {vocabulary_size - 1}. Is the tokenizer this model's?"
        )
    if max_new_tokens < 1:
        raise GenerateError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if len(prompt) + max_new_tokens > max_tokens:
        raise GenerateError(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones are more than the {max_tokens} this generator "
            "was made for; make it with a larger max_length"
        )
