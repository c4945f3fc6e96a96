"""Compiled code from one start to the next, and from the process that compiled it to the others.

Torch has a cache of its own, but to ask it a part must be traced and lowered first, which takes most of the time. Here
the key is what a part is made of. Of a part the code that Inductor wrote is kept, and of a division which call runs
which; where anything is missing, or is of no use, the part is compiled, and torch's cache asked.
"""

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._guards import TracingContext

from numadist.cache.store import Store
from numadist.config import cache_folder
from numadist.graph.model_key import files_digest
from numadist.log import get_logger

log = get_logger(__name__)

_CPUINFO = Path("/proc/cpuinfo")
_KINDS_OF_CPU = "flags", "Features", "model name", "CPU part"


@dataclass(frozen=True)
class PartCode:
    """source: the module that Inductor wrote; its `call` is the part.

    sizes: inputs and their dims, whose sizes are inputs too, after the others. guards: of the named sizes; empty: none.
    """

    source: str
    sizes: Sequence[Sequence[int]]
    guards: str


@dataclass(frozen=True)
class DivisionCode:
    """parts: names of entries. runs: of every call the index of its part."""

    parts: list[str]
    runs: list[int]


class CodeStore:
    """What is kept for this process's environment; nothing where no folder is, or the environment has no words."""

    def __init__(self) -> None:
        folder, environment = cache_folder(), _environment()
        self._store = Store(folder) if folder is not None and environment else None
        self._environment = environment

    def name(self, *what: str) -> str:
        words = "\0".join((self._environment, *what))
        return "code-" + hashlib.blake2b(words.encode(), digest_size=16).hexdigest()

    def part(self, name: str) -> PartCode | None:
        found = self._read(name)
        return PartCode(**found) if found else None

    def division(self, name: str) -> DivisionCode | None:
        found = self._read(name)
        return DivisionCode(**found) if found else None

    def keep(self, name: str, what: PartCode | DivisionCode) -> None:
        if self._store is not None:
            self._store.write(name, json.dumps(asdict(what)).encode())

    def _read(self, name: str) -> dict[str, Any] | None:
        data = self._store.read(name) if self._store is not None else None
        return json.loads(data) if data is not None else None

    def knows_isas(self) -> bool:
        """Whether the compiler makes code for all that this CPU has, tried once: four compilations, or as many loads.

        True is for Inductor's option cpp.vec_isa_ok, which leaves the trying out.
        """
        name = self.name("instruction sets")
        found = self._store.read(name) if self._store is not None else None
        if found is None:
            found = b"all" if _isas_tried() else b"some"
            if self._store is not None:
                self._store.write(name, found)
        return found == b"all"


def loaded(source: str) -> ModuleType:
    """The module of kept code. Its kernels come from torch's folder, or are compiled anew."""
    from torch._inductor.codecache import PyCodeCache

    with _without_headers():
        module: ModuleType = PyCodeCache.load_by_key_path(*PyCodeCache.write(source))
    return module


@contextlib.contextmanager
def _without_headers() -> Iterator[None]:
    """Inside, no header is compiled beforehand, which is tried before it is known that there is nothing to compile."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    name = "_get_uncompiled_header"
    theirs = vars(Cache).get(name)
    if theirs is not None:
        setattr(Cache, name, classmethod(lambda cls, device: None))
    try:
        yield
    finally:
        if theirs is not None:
            setattr(Cache, name, theirs)


def is_plain(compiled: Any, context: TracingContext, num_inputs: int, num_outputs: int) -> bool:
    """Whether a part does no more than call what Inductor made of it, on its own inputs for its own outputs.

    compiled: all that Inductor compiled for it. context: that it was compiled in.
    """
    if len(compiled) != 1 or getattr(compiled[0][0], "constants", None):
        return False
    _, inputs, outputs = compiled[0]
    about: Any = context.fw_metadata
    try:
        return (
            (inputs, outputs) == (num_inputs, num_outputs)
            and about.num_mutated_inp_runtime_indices == 0
            and not about.tokens
            and all(o.output_type.name == "non_alias" for o in about.output_info)
        )
    except AttributeError as reason:  # another torch, or nothing is known
        log.debug("compiled code is not kept: %s", reason)
        return False


def _isas_tried() -> bool:
    import torch._inductor.config as inductor_config

    try:
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        tried = list(map(str, valid_vec_isa_list()))
        valid_vec_isa_list.cache_clear()
        with inductor_config.patch({"cpp.vec_isa_ok": True}):
            known = list(map(str, valid_vec_isa_list()))
    except (ImportError, AttributeError, KeyError) as reason:  # another torch
        log.debug("every start tries what the compiler has: %s", reason)
        return False
    if tried != known:
        valid_vec_isa_list.cache_clear()
        log.debug("of the instruction sets %s the compiler has %s", known, tried)
    return tried == known


def _environment() -> str:
    """What code depends on besides its part; empty if that has no words."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    settings = [
        repr(sorted(config.save_config_portable().items())) for config in (inductor_config, functorch_config)
    ]
    own_passes = any(callable(value) for value in inductor_config.get_config_copy().values())
    if own_passes or any(" at 0x" in text for text in settings):
        log.debug("compiled code is not kept: a setting of Inductor is a function or another object")
        return ""
    if inductor_config.force_disable_caches:
        return ""
    # Inductor writes the number of threads into its loops.
    return "\0".join((own_tag(), _versions(), str(torch.get_num_threads()), *settings))


@functools.cache
def own_tag() -> str:
    """What compiled code depends on and torch does not know: this package, and the limit of instruction sets."""
    package = Path(__file__).parents[1]
    source = files_digest(package / folder for folder in ("kernels", "lowering", "comm"))
    return f"numadist {source} {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def _versions() -> str:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    cpu: Sequence[str] = sorted({line for line in lines if line.startswith(_KINDS_OF_CPU)})
    return "\n".join((sys.version, torch.__version__, torch.version.git_version, *cpu))
