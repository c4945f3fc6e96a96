"""transformers' own reading of a GGUF file's config and tokenizer, over our reader of headers.

For most architectures transformers has the package gguf read the file, which makes an array of every word of the
vocabulary, several times: 5 s for 49,000 words. What it makes of them is not done again here.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numadist.weights.gguf_header import GgufHeader, read_header
from numadist.weights.hugging_face import quiet_transformers

# The package gguf's numbers of types.
_BOOL, _STRING, _LIST, _INT, _FLOAT = 7, 8, 9, 11, 12
_VOCABULARY = "tokenizer."

_patching = threading.Lock()


def gguf_config(path: Path) -> Any:
    """The file's config, as AutoConfig gives it; of experts with the size that the file says."""
    with quick_reader(path, vocabulary=False):
        config = _loaded("AutoConfig", path)
    fields = read_header(path).fields
    size = fields.get(f"{fields.get('general.architecture')}.expert_feed_forward_length")
    # transformers leaves it at the default, that of one of the models.
    if size is not None and hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = int(size)
    return config


def gguf_tokenizer(path: Path) -> Any:
    """The file's tokenizer, as AutoTokenizer gives it."""
    with quick_reader(path, vocabulary=True):
        return _loaded("AutoTokenizer", path)


def _loaded(auto_class: str, path: Path) -> Any:
    made = getattr(quiet_transformers(), auto_class)
    return made.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


@contextlib.contextmanager
def quick_reader(path: Path, vocabulary: bool) -> Iterator[None]:
    """Inside, on this thread, the package gguf opens this file by our reader: fields, names and shapes, no values.

    vocabulary: with the words of its tokenizer; else only their number is right.
    """
    import gguf

    theirs, thread = gguf.GGUFReader, threading.get_ident()

    def reader(of: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or threading.get_ident() != thread or Path(of) != path:
            return theirs(of, *args, **kwargs)
        return _Reader(read_header(path, lambda key: vocabulary or not key.startswith(_VOCABULARY)))

    with _patching:
        gguf.GGUFReader = reader  # type: ignore[misc,assignment]
        try:
            yield
        finally:
            gguf.GGUFReader = theirs  # type: ignore[misc]


class _Reader:
    """As much of gguf.GGUFReader as transformers asks for a config or a tokenizer."""

    def __init__(self, header: GgufHeader):
        self.fields = {key: _Field(value) for key, value in {**header.fields, **header.lists}.items()}
        for key, found in header.lists.items():
            if isinstance(found, int):
                self.fields[key] = _Field([0] * found)
        self.tensors = header.tensors


class _Field:
    """parts[i] for i in data are the values as the file has them."""

    def __init__(self, value: Any):
        values = value if isinstance(value, list) else [value]
        self.parts = [v.encode() if isinstance(v, str) else (v,) for v in values]
        self.data = range(len(values))
        self.types = [_LIST] * isinstance(value, list) + [_kind(v) for v in values[:1]]


def _kind(value: Any) -> int:
    """Of lists of lists transformers knows none either."""
    kinds = {bool: _BOOL, str: _STRING, int: _INT, float: _FLOAT}
    return kinds[type(value)]
