"""A peer of decode.py: llama.cpp by llama-cpp-python, one process, all cores. Runs in an interpreter of its own."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from decode_protocol import serve

# By its path: the interpreter may know nothing of numadist.
CONTEXT = Path(__file__).parents[1] / "numadist" / "compare" / "llama_context.py"


def load_context_class():
    spec = importlib.util.spec_from_file_location("llama_context", CONTEXT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LlamaContext


class Decoder:
    """Holds a context of every row and decodes from it again and again."""

    def __init__(self, setting: dict):
        prompts = setting["prompts"]
        self.rows, self.length = len(prompts), len(prompts[0])
        self.context = load_context_class()(
            setting["gguf"],
            self.rows,
            slots=self.length + setting["tokens"] + 2,
            at_once=max(self.length, self.rows),
            threads=len(setting["cpus"]),
            kv="f16",
        )
        self.first = [self._prefill(row, prompt) for row, prompt in enumerate(prompts)]

    def decode(self) -> Iterator[list[int]]:
        for row in range(self.rows):
            self.context.forget(row, self.length)
        tokens, position = self.first, self.length
        while True:
            yield tokens
            self.context.run([(token, position, row, True) for row, token in enumerate(tokens)])
            tokens, position = [self._best(row) for row in range(self.rows)], position + 1

    def _prefill(self, row: int, prompt: list[int]) -> int:
        last = len(prompt) - 1
        self.context.run([(token, i, row, i == last) for i, token in enumerate(prompt)])
        return self._best(last)

    def _best(self, entry: int) -> int:
        return int(self.context.logits(entry).argmax())


if __name__ == "__main__":
    serve(lambda setting: Decoder(setting).decode, "weights of the file, keys and values f16")
