"""The module that `numadist.shard` returns: what torch.nn.Module offers works here, or is refused with a reason."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from numadist.errors import ShardError
from numadist.graph.modes import follows_mode, graph_draws_numbers, switcher
from numadist.pipeline.stages import LocalModel
from numadist.pipeline.whole import gather_whole, part_of
from numadist.sharding.placement import Shard

PACKED = (
    "compile=True has packed the weights, so they can be neither changed nor saved: call numadist.shard again, or "
    "leave compile=True out"
)


class ShardedModel(torch.nn.Module):
    """One rank's part of a model; called as the original is, returns what the original returns on every rank.

    local: this rank's graph, an ordinary module with local parameters. local_bytes: of the parameters this rank
    holds, tied names counted once. schema: the decisions it was made by.
    Keyword inputs of the example that are no tensors (`use_cache=False`) are part of the graph and may be left out.
    state_dict() has whole tensors under the names of the unsharded model, and load_state_dict() takes such: both are
    collective calls.
    """

    def __init__(self, part: LocalModel, group: dist.ProcessGroup):
        super().__init__()
        self.local = part.gm
        self.schema = part.schema
        self.rank = part.rank
        self.local_bytes = part.num_bytes
        self.group_name = group.group_name
        self._part = part
        self._compiled: Callable[..., Any] | None = None
        self._shards = part.schema.param_shards()
        # Biases that only rank 0 adds: a graph for inference has zeros for them on the other ranks.
        self._on_rank_0 = frozenset() if part.train else part.schema.partial_params()
        self._packed: list[tuple[torch.nn.Parameter, int]] | None = (
            None  # with their versions, of a compiled model
        )
        self._draws = graph_draws_numbers(part.gm)
        self._switch = switcher(part.gm)
        self.training = part.training
        for name in ("train", "eval"):  # torch.export puts functions there that refuse to run
            vars(part.gm).pop(name, None)
        self.register_state_dict_pre_hook(_check_not_erased)  # type: ignore[no-untyped-call]
        self._register_state_dict_hook(_to_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_to_parts)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_by_whole_names)  # type: ignore[no-untyped-call]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the model."""
        return _resolve_process_group(self.group_name)

    def placement(self, name: str) -> Shard:
        """What ranks hold of a parameter of `local`; empty: each has the whole of it."""
        return self._shards.get(name, Shard({}))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for these inputs, on every rank alike."""
        run = self._compiled or self.local
        if any(p._version != version for p, version in self._packed or ()):
            raise ShardError(f"a weight has changed after the first call; {PACKED}")
        with self._same_numbers() if self._draws else contextlib.nullcontext():
            outputs = run(*args, **{**self._part.constants, **kwargs})
        if self._compiled is not None and self._packed is None:
            # Only now: the first call throws away the parameters that nothing reads any more.
            self._packed = [(p, p._version) for p in self.local.parameters() if not _is_erased(p)]
        return outputs

    @contextlib.contextmanager
    def _same_numbers(self) -> Iterator[None]:
        """Have all ranks draw the same random numbers, those of a seed that rank 0 draws."""
        seed = torch.randint(2**62, (1,))
        dist.broadcast(seed, group=self.group, group_src=0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            yield

    def compile_local(self) -> None:
        """Compile this rank's graph; the first call then takes the time that compilation takes."""
        self._compiled = self._part.compile()

    def train(self, mode: bool = True) -> "ShardedModel":
        """Put the model into training or evaluation mode.

        Raises: ShardError if it was captured in evaluation mode and has dropout, or is compiled and depends on it.
        """
        if mode == self.training:
            return self
        depends = any(follows_mode(node) for node in self.local.graph.nodes)
        if (self._part.hidden_dropout or depends) and not self._part.training:
            raise ShardError(
                f"{self._part.name} was captured in evaluation mode, whose graph lacks what training adds: "
                "call model.train() before numadist.shard to train it; eval() and train() can be switched then"
            )
        if depends and self._compiled is not None:
            raise ShardError(
                "the mode is part of a compiled graph; call numadist.shard again for the other mode"
            )
        self._switch(mode)
        self.training = mode
        self._draws = graph_draws_numbers(self.local)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardedModel":
        """What to(), half(), cpu(), float() call. Raises: ShardError for another dtype or device."""
        for name, t in [*self.local.named_parameters(), *self.local.named_buffers()]:
            empty = torch.empty(0, dtype=t.dtype)
            moved = fn(empty)
            if moved.dtype != empty.dtype or moved.device != empty.device:
                raise ShardError(
                    f"{name} is {t.dtype} on this rank's node, asked for {moved.dtype} on {moved.device}: dtypes and "
                    "places are part of the graph; convert the model before numadist.shard"
                )
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "ShardedModel":
        raise ShardError("a sharded model is one rank's part and cannot be copied; call numadist.shard again")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError("a sharded model is one rank's part and cannot be pickled; save its state_dict()")


def _check_not_erased(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """Before a state dict. Raises: ShardError if parameters have been thrown away."""
    assert isinstance(module, ShardedModel)
    if module._part.has_packed or any(_is_erased(p) for p in module.parameters()):
        raise ShardError(PACKED)


def _to_whole(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Of a state dict: local parts under `local.` become whole tensors under the unsharded model's names."""
    assert isinstance(module, ShardedModel)
    start = f"{prefix}local."
    for key in [key for key in state if key.startswith(start)]:
        name, local = key.removeprefix(start), state.pop(key)
        whole = gather_whole(local, module.placement(name), module.rank, module.group)
        if name in module._on_rank_0:
            dist.broadcast(whole, group=module.group, group_src=0)
        state[prefix + name] = whole
    for name, others in module._part.tied_names.items():
        for other in others:
            if prefix + name in state:
                state.setdefault(prefix + other, state[prefix + name])


def _to_parts(module: torch.nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Of a state dict to load: whole tensors become this rank's parts under `local.`."""
    assert isinstance(module, ShardedModel)
    if module._compiled is not None:
        raise ShardError(PACKED)
    own = dict(module.local.state_dict(keep_vars=True))
    known = {*own, *module._part.tied_names, *module._part.unused_names}
    for key in [key for key in state if key.startswith(prefix) and key.removeprefix(prefix) in known]:
        name, whole = key.removeprefix(prefix), state.pop(key)
        if name in own:
            placed = module.placement(name)
            part = part_of(whole, name, placed, module.rank, own[name].shape)
            elsewhere = name in module._on_rank_0 and module.rank != 0
            state[f"{prefix}local.{name}"] = torch.zeros_like(part) if elsewhere else part


def _by_whole_names(module: torch.nn.Module, incompatible: Any) -> None:
    """Missing keys, which torch finds in `local`, under the names of the unsharded model."""
    for keys in incompatible:
        keys[:] = [key.removeprefix("local.") for key in keys]


def _is_erased(parameter: torch.nn.Parameter) -> bool:
    """Inductor has dropped its values when it packed them. Importing Inductor takes seconds."""
    freezing: Any = sys.modules.get("torch._inductor.freezing")
    return freezing is not None and isinstance(parameter, freezing.ErasedTensor)
