"""One step of generation as one graph: tokens and KV tensors in, logits of the last position out.

A row is a sequence; slot p of a row's KV tensors holds its token at position p. So the whole state of a row is how
many slots are filled: prompts of different lengths, prompts read in chunks and rows that decode differ only in the
positions they pass in, and no row needs padding in the cache. In a batch whose rows bring different numbers of
tokens the shorter ones are padded on the left; a padding token writes to the last slot, which no query reads.

Shapes: B rows, T tokens a row, S slots, H KV heads, K key size, D value size, V vocabulary.
"""

import contextlib
import inspect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule, Node
from transformers.cache_utils import Cache
from transformers.integrations import sdpa_attention

from numadist.errors import GenerateError, NumadistError
from numadist.graph import query
from numadist.graph.capture import CapturedModel, as_in_export
from numadist.graph.passes import run_passes
from numadist.graph.query import aten
from numadist.graph.unchanged import unchanged
from numadist.pipeline import passes
from numadist.pipeline.stages import capture

# Sizes of the example inputs: all different, so that no dim is taken for another.
_ROWS, _TOKENS, _SLOTS = 2, 3, 16
_MAX_SIZE = 1 << 20
_patching = threading.RLock()


@dataclass(frozen=True)
class KvShape:
    """One layer's part of the cache: keys [B, H, S, K], values [B, H, S, D]."""

    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


class _Recorder(Cache):
    """Notes what each layer caches."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, KvShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        _, heads, _, key_size = key_states.shape
        self.shapes[layer_idx] = KvShape(heads, key_size, value_states.shape[-1], key_states.dtype)
        return key_states, value_states


class _SlotCache(Cache):
    """Writes new keys and values into the slots they are told, in place, and gives back whole tensors."""

    def __init__(self, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], slots_BT: Tensor):
        super().__init__(layers=[])
        self.tensors = keys, values
        self.rows_B1 = torch.arange(slots_BT.shape[0], device=slots_BT.device)[:, None]
        self.slots_BT = slots_BT

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        index = [self.rows_B1, None, self.slots_BT]
        whole = [
            torch.ops.aten.index_put_(tensors[layer_idx], index, new.transpose(1, 2))
            for tensors, new in zip(self.tensors, (key_states, value_states), strict=True)
        ]
        return whole[0], whole[1]


class Step(torch.nn.Module):
    """The unmodified model with its cache and masks as plain tensors: what is exported.

    forward: input_ids, positions, slots [B, T]; keys, values: one tensor a layer that caches. Returns [B, V].
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        if not {"input_ids", "attention_mask", "position_ids"} <= set(accepted):
            raise GenerateError(
                f"{type(model).__name__} takes no attention_mask or no position_ids; numadist generates with causal "
                "language models that take both"
            )
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        if getattr(model.config, "alibi", False):
            raise GenerateError(
                f"{type(model).__name__} has alibi=True: its attention adds a bias by distance, which needs the "
                "model's own mask. numadist generates with models whose positions are rotary or learned"
            )
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.layers = self._recorded_layers()

    def _recorded_layers(self) -> dict[int, KvShape]:
        """Layers that cache, found by running two tokens through the model."""
        recorder = _Recorder()
        positions = torch.arange(2)[None]
        try:
            with unchanged(self.model), as_in_export(), torch.no_grad():
                self._run(torch.zeros_like(positions), positions, recorder, 2)
        except NumadistError:
            raise
        except Exception as error:
            raise GenerateError(
                f"{type(self.model).__name__} fails when it is given a cache, a mask of [B, 1, T, S] and positions, as "
                f"numadist gives them: {type(error).__name__}: {error}"
            ) from error
        if not recorder.shapes:
            raise GenerateError(f"{type(self.model).__name__} caches no keys and values; is it a decoder?")
        return dict(sorted(recorder.shapes.items()))

    def forward(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        kept = _SlotCache(
            dict(zip(self.layers, keys, strict=True)), dict(zip(self.layers, values, strict=True)), slots
        )
        logits_BTV = self._run(input_ids, positions, kept, keys[0].shape[2])
        return logits_BTV[:, -1]

    def _run(self, input_ids: Tensor, positions: Tensor, cache: Cache, num_slots: int) -> Tensor:
        masks = attention_masks(self.model.config, positions, num_slots)
        inputs = {"input_ids": input_ids, "position_ids": positions, "attention_mask": masks}
        outputs = self.model(**inputs, **{self.cache_name: cache}, **self.last_only, use_cache=True)
        logits: Tensor = outputs.logits
        return logits


def attention_masks(config: Any, positions_BT: Tensor, num_slots: Any) -> Any:
    """Which slots each token sees, [B, 1, T, S]: one mask, or one a kind of layer where the config names kinds."""
    config = config.get_text_config()
    slot_S = torch.arange(num_slots, device=positions_BT.device)[None, None, None]
    position_BT = positions_BT[:, None, :, None]
    past: Tensor = slot_S <= position_BT
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)

    def mask_of(kind: str) -> Tensor:
        seen: Tensor
        if kind == "sliding_attention" and window is not None:
            seen = past & (slot_S > position_BT - window)
        elif kind == "chunked_attention" and chunk is not None:
            seen = past & (slot_S // chunk == position_BT // chunk)
        elif kind == "full_attention":
            seen = past
        else:
            raise GenerateError(
                f"numadist cannot generate with layers of kind {kind!r}: they keep no keys and values"
            )
        if config._attn_implementation == "sdpa":
            return seen
        dtype = config.dtype or torch.float32
        return torch.zeros((), dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    if getattr(config, "layer_types", None):
        return {kind: mask_of(kind) for kind in sorted(set(config.layer_types))}
    if window is not None:
        return mask_of("sliding_attention")
    return mask_of("full_attention" if chunk is None else "chunked_attention")


@dataclass
class CapturedStep:
    """The exported step; its graph is called with the arguments of Step.forward."""

    captured: CapturedModel
    layers: list[KvShape]

    @property
    def gm(self) -> GraphModule:
        return self.captured.gm

    def kv_inputs(self) -> tuple[list[str], list[str]]:
        """Names of the graph's inputs for keys and for values, in the order of `layers`."""
        return _kv_inputs(self.gm, len(self.layers))


def _kv_inputs(gm: GraphModule, num_layers: int) -> tuple[list[str], list[str]]:
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"][3:]
    return names[:num_layers], names[num_layers:]


def _refuse_chance(model: Any, gm: GraphModule) -> None:
    """Raise GenerateError for a graph whose result depends on random numbers: every rank would draw its own."""
    drawing = [n for n in gm.graph.nodes if _draws(n)]
    if not drawing:
        return
    what = f"{type(model).__name__} draws random numbers ({drawing[0].target}) in every step"
    if any(module.training for module in model.modules()):
        raise GenerateError(f"{what}, as it is in training mode: call model.eval()")
    raise GenerateError(f"{what}; numadist generates with models that compute the same on every rank")


def _draws(node: Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is aten.dropout.default:
        return bool(node.args[1] and node.args[2])
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(query.argument(node, 4, "dropout_p", 0.0))
    return True


def capture_step(model: torch.nn.Module) -> CapturedStep:
    """Export one step of `model` for any number of rows, tokens and slots.

    Raises: GenerateError for a model that does not cache keys and values, ShardError if it cannot be exported.
    """
    with _heads_not_repeated(model):
        return _captured(Step(model))


@contextlib.contextmanager
def _heads_not_repeated(model: torch.nn.Module) -> Iterator[None]:
    """Inside, transformers leaves it to attention to share KV heads, as the graph will: see use_grouped_attention.

    With a mask it repeats them, which makes a quarter of all there is to trace.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    name = "use_gqa_in_sdpa"
    if heads == kv_heads or not hasattr(sdpa_attention, name):
        yield
        return
    with _patching:  # ranks may be threads
        theirs = getattr(sdpa_attention, name)
        setattr(sdpa_attention, name, lambda *args, **kwargs: True)
        try:
            yield
        finally:
            setattr(sdpa_attention, name, theirs)


def _captured(step: Step) -> CapturedStep:
    layers = list(step.layers.values())
    rows, tokens, slots = (
        Dim("rows", max=_MAX_SIZE),
        Dim("tokens", max=_MAX_SIZE),
        Dim("slots", max=_MAX_SIZE),
    )
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
    positions = torch.arange(_TOKENS).repeat(_ROWS, 1)

    def empty(size: str) -> list[Tensor]:
        return [torch.zeros(_ROWS, k.num_heads, _SLOTS, getattr(k, size), dtype=k.dtype) for k in layers]

    in_rows, in_slots = {0: rows, 1: tokens}, [{0: rows, 2: slots}] * len(layers)
    inputs = (ids, positions, positions.clone(), empty("key_size"), empty("value_size"))
    captured = capture(step, inputs, (in_rows, in_rows, in_rows, in_slots, in_slots))
    _refuse_chance(step.model, captured.gm)
    run_passes(captured.gm, passes.STEP)
    names = [name for names in _kv_inputs(captured.gm, len(layers)) for name in names]
    return CapturedStep(replace(captured, state_inputs=frozenset(names)), layers)
