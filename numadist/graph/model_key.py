"""A digest of everything that decides what the capture of a model gives: its code, its attributes, its inputs.

Code is taken as it is loaded, so a function that was put in the place of another counts, and also as its file is. It is
followed from the model's classes into the files they use; torch, the standard library and other installed packages
count by their versions. Values of parameters do not count: torch.export does not see them.
"""

import enum
import functools
import hashlib
import inspect
import logging
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Buffers up to this size count by value. A larger attribute that is no buffer is refused: forward may read it.
_SMALL_BYTES = 1 << 16
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), slice, range)
_BY_NAME = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OpOverload)
_INSTALLED = tuple(str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib"))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code made
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
# This package's files are counted by the caller.
_AS_A_WHOLE = str(Path(torch.__file__).resolve().parent), str(Path(__file__).resolve().parents[1])
# Of a config of transformers: a hash that is another one in every process.
_NOT_COUNTED = frozenset({"_original_object_hash"})
_OF_MODULE = frozenset(vars(torch.nn.Module()))


class NoKey(Exception):
    """The model has something that no digest holds; the text says what."""


def model_key(model: torch.nn.Module, *others: Any) -> str:
    """others: inputs and options. Raises: NoKey."""
    digest = _Digest()
    digest.words(sys.version, torch.__version__, torch.version.git_version, torch.get_default_dtype())
    digest.words(
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_inference_mode_enabled()
    )
    digest.words(torch.are_deterministic_algorithms_enabled(), torch.backends.mha.get_fastpath_enabled())
    if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():  # type: ignore[no-untyped-call]
        raise NoKey("a mode around it, which may change every op")
    if any(getattr(torch.nn.modules.module, name, None) for name in _GLOBAL_HOOKS):
        raise NoKey("all modules have hooks")
    try:
        digest.registries()
        digest.value(model)
        digest.value(others)
        digest.follow()
    except RecursionError:
        raise NoKey("objects in objects, too many to follow") from None
    return digest.hexdigest()


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What counts of example inputs: their structure, shapes and constants, but no values of tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), [_shape_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def files_digest(folders: Iterable[Path]) -> str:
    """Of all Python files below the folders."""
    found = hashlib.blake2b(digest_size=20)
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        found.update(f"{path.name} {_file_digest(str(path))}".encode())
    return found.hexdigest()


@functools.cache
def _file_digest(path: str) -> str:
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=20).hexdigest()


def _shape_of(t: Tensor) -> list[Any]:
    if t.layout is not torch.strided:
        raise NoKey(f"a tensor of layout {t.layout}")
    where = t.dtype, t.device, tuple(t.shape), t.stride(), t.requires_grad
    return [isinstance(t, torch.nn.Parameter), _class_of(t), *where]


def _class_of(t: Tensor) -> str:
    """A tensor without memory is captured as one with."""
    fake = isinstance(t, torch._subclasses.FakeTensor)
    return "torch.Tensor" if fake or type(t) is torch.nn.Parameter else _name(type(t))


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


class _Digest:
    """Words of everything that was added, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, whose id is then not taken again
        self._modules: dict[str, bool] = {}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def words(self, *words: Any) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def value(self, v: Any) -> None:
        """Raises: NoKey for what is not understood."""
        if isinstance(v, _PLAIN):
            self.words(_name(type(v)), repr(v))
        elif isinstance(v, (*_BY_NAME, type)):
            self._named(v)
        elif id(v) in self._seen:
            self.words("again", self._seen[id(v)][0])
        else:
            self._seen[id(v)] = len(self._seen), v
            self._compound(v)

    def _named(self, v: Any) -> None:
        if isinstance(v, type):
            self.words("class", _name(v))
            self._class(v)
        else:
            self.words(type(v).__name__, v)

    def _compound(self, v: Any) -> None:
        if isinstance(v, Tensor):
            self._tensor(v)
        elif isinstance(v, torch.nn.Module):
            self._module(v)
        elif isinstance(v, types.FunctionType):
            self._function(v)
        elif isinstance(
            v, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType
        ):
            self.words("builtin", v.__qualname__, getattr(v, "__module__", None))
        elif isinstance(v, types.MethodType):
            self.words("method")
            self.value(v.__func__)
            self.value(v.__self__)
        elif isinstance(v, functools.partial):
            self.words("partial")
            self.value((v.func, v.args, v.keywords))
        elif isinstance(v, types.ModuleType):
            self.words("module", v.__name__)
            self._modules.setdefault(v.__name__, False)
        elif isinstance(v, logging.Logger):
            self.words("logger", v.name)
        elif isinstance(v, enum.Enum):
            self.words(_name(type(v)), v.name)
        elif isinstance(v, Mapping | list | tuple | set | frozenset):
            self._container(v)
        else:
            self._object(v)

    def _container(self, v: Any) -> None:
        self.words(_name(type(v)), len(v))
        if hasattr(v, "__dict__"):
            self._named(type(v))
            self.value(vars(v))
        if isinstance(v, Mapping):
            for key, item in v.items():
                self.value(key)
                self.value(item)
        elif isinstance(v, set | frozenset):
            if not all(isinstance(item, _PLAIN) for item in v):
                raise NoKey("a set of objects, whose order changes")
            self.words(*sorted(map(repr, v)))
        else:
            for item in v:
                self.value(item)

    def _object(self, v: Any) -> None:
        """By its class and attributes, if Python code alone made it."""
        classes = type(v).__mro__[:-1]
        if not hasattr(v, "__dict__") or not all(c.__flags__ & _HEAP_TYPE for c in classes):
            raise NoKey(f"a {_name(type(v))}")
        self._named(type(v))
        self.value({name: item for name, item in vars(v).items() if name not in _NOT_COUNTED})

    def _tensor(self, t: Tensor) -> None:
        """What is no parameter and no buffer: forward may ask for its values."""
        self.value(_shape_of(t))
        if isinstance(t, torch.nn.Parameter | torch._subclasses.FakeTensor):
            return
        if t.numel() * t.element_size() > _SMALL_BYTES or t.device.type != "cpu":
            raise NoKey(f"a tensor of {tuple(t.shape)} that is no parameter and no buffer")
        self.words(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _module(self, module: torch.nn.Module) -> None:
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise NoKey(f"{type(module).__name__} has hooks")
        self._named(type(module))
        self.words(module.training, sorted(module._non_persistent_buffers_set))
        for name, parameter in module._parameters.items():
            self.words("parameter", name)
            self.value(None if parameter is None else parameter)
        for name, buffer in module._buffers.items():
            self.words("buffer", name)
            if buffer is None or buffer.numel() * buffer.element_size() <= _SMALL_BYTES:
                self.value(buffer)
            else:
                self.value([_shape_of(buffer), self._number(buffer)])
        for name, child in module._modules.items():
            self.words("module", name)
            self.value(child)
        for name, v in vars(module).items():
            if name in _OF_MODULE:
                continue
            if inspect.isroutine(v) and name in dir(type(module)):
                raise NoKey(f"{type(module).__name__} has a {name} of its own")
            self.words("attribute", name)
            self.value(v)

    def _number(self, t: Tensor) -> int:
        """The same for the same tensor: ties count."""
        return self._seen.setdefault(id(t), (len(self._seen), t))[0]

    def _class(self, cls: type) -> None:
        """Its code and that of its bases."""
        for c in cls.__mro__:
            if id(c) in self._seen or not c.__flags__ & _HEAP_TYPE:
                continue
            self._seen[id(c)] = len(self._seen), c
            self.words("base", _name(c))
            self._modules[c.__module__] = True
            for name, member in vars(c).items():
                self._member(c, name, member)

    def _member(self, c: type, name: str, member: Any) -> None:
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        parts = [member.fget, member.fset] if isinstance(member, property) else [member]
        for f in parts:
            if isinstance(f, types.FunctionType):
                # Of torch's classes only what somebody else put there.
                if not _is_by_version(f.__code__.co_filename) or not _is_by_version(_file_of(c)):
                    self.words("member", name)
                    self.value(f)
            elif isinstance(f, _PLAIN) and not name.startswith("__"):
                self.words("member", name, repr(f))

    def _function(self, f: types.FunctionType) -> None:
        """Its code. What an installed function closes over is its own affair, but a function that it wraps."""
        self.words("function", f.__module__, f.__qualname__)
        self._code(f.__code__)
        own = not _is_installed(f.__code__.co_filename)
        if own:
            self.value((f.__defaults__, f.__kwdefaults__))
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if own or isinstance(content, types.FunctionType):
                self.words("cell", name)
                self.value(content)
        if own:
            self._used(f)
        name = str(f.__globals__.get("__name__"))
        if name.startswith("namedtuple_"):
            return
        if vars(sys.modules.get(name, types)) is not f.__globals__:
            raise NoKey(f"code of a module {name} that is not loaded, or was loaded again")
        self._modules.setdefault(name, False)

    def _used(self, f: types.FunctionType) -> None:
        """What the function finds by a global name, and by an attribute of a module that is one."""
        names = sorted(_names(f.__code__))
        for name in names:
            v = f.__globals__.get(name)
            self.words("global", name)
            self.value(v)
            if isinstance(v, types.ModuleType) and not _is_installed(str(getattr(v, "__file__", None) or "")):
                for inner in names:
                    self.value(vars(v).get(inner))

    def _code(self, code: types.CodeType) -> None:
        self.words("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._code(const)
            else:
                self.words(sorted(map(repr, const)) if isinstance(const, frozenset) else repr(const))

    def registries(self) -> None:
        """Attention functions of transformers, which models find by a name in their config."""
        for module, name in (
            ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
            ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
        ):
            registry = getattr(sys.modules.get(module), name, None)
            self.words(name)
            if registry is not None:
                for key in sorted(registry):
                    self.words(key)
                    self.value(registry[key])

    def follow(self) -> None:
        """The files that code lies in, and those that these use."""
        done: set[tuple[str, bool]] = set()
        while todo := [item for item in self._modules.items() if item not in done]:
            for name, has_class in todo:
                done.add((name, has_class))
                self._source(name, has_class)

    def _source(self, name: str, has_class: bool) -> None:
        """has_class: of a class of the model, which may use what was put into its module."""
        module = sys.modules.get(name)
        self.words("source", name)
        if module is None:
            raise NoKey(f"code of a module {name} that is not loaded")
        path = getattr(module, "__file__", None)
        if name.partition(".")[0] in sys.builtin_module_names or (path and _is_by_version(path)):
            return
        if path is None or not Path(path).is_file():
            raise NoKey(f"{name} without a source")
        if _is_installed(path):
            top = sys.modules.get(name.partition(".")[0])
            self.words(str(getattr(top, "__version__", "")))
        self.words(_file_digest(path))
        if has_class and _is_installed(path):
            self._globals(module)

    def _globals(self, module: types.ModuleType) -> None:
        """Of an installed module: its functions and classes as they are now, whoever put them there."""
        for name, v in list(vars(module).items()):
            if isinstance(v, types.FunctionType):
                self.words("global", name)
                self.value(v)
            elif isinstance(v, type):
                self.words("global", name, _name(v))
                if not _is_installed(_file_of(v)):
                    self._class(v)
            elif isinstance(v, bool | int | float) and not name.startswith("__"):
                self.words("global", name, repr(v))


def _names(code: types.CodeType) -> set[str]:
    """Of globals and attributes, in inner functions too."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


def _file_of(c: type) -> str:
    """The file of a class's module; empty for one that has none."""
    return str(getattr(sys.modules.get(c.__module__), "__file__", None) or "")


@functools.cache
def _is_installed(file: str) -> bool:
    """It comes with Python or by pip."""
    return str(Path(file).resolve()).startswith((*_INSTALLED, *_AS_A_WHOLE))


@functools.cache
def _is_by_version(file: str) -> bool:
    """It comes with Python or torch, whose versions count as a whole, or is ours."""
    path = str(Path(file).resolve())
    return path.startswith(_AS_A_WHOLE) or (path.startswith(_INSTALLED[0]) and "-packages/" not in path)
