"""A peer of decode.py: llama.cpp by llama-cpp-python, one process, all cores. Runs in an interpreter of its own.

python decode_llama_cpp.py convert FROM.gguf TO.gguf     rewrites a quantized file in bfloat16
"""

import ctypes
import sys
from collections.abc import Iterator

import llama_cpp as ll
import numpy as np
from decode_protocol import serve

F16, BF16_FILE = 1, 32  # ggml_type of keys and values; llama_ftype of a file


@ll.llama_log_callback
def quiet(level, text, data):
    if level == 4:  # errors; 5 continues a line of any level
        print(text.decode(), end="", file=sys.stderr)


class Decoder:
    """Holds a context of every row and decodes from it again and again."""

    def __init__(self, setting: dict):
        prompts, threads = setting["prompts"], len(setting["cpus"])
        self.rows, self.context = len(prompts), len(prompts[0])
        slots = self.context + setting["tokens"] + 2
        self.model = ll.llama_model_load_from_file(setting["gguf"].encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx = self.rows * (-(-slots // 256) * 256)
        params.n_seq_max, params.n_batch, params.n_ubatch = self.rows, self.context, self.context
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = F16
        self.ctx = ll.llama_init_from_model(self.model, params)
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(max(self.context, self.rows), 0, 1)
        self.first = [self._prefill(row, prompt) for row, prompt in enumerate(prompts)]

    def decode(self) -> Iterator[list[int]]:
        memory = ll.llama_get_memory(self.ctx)
        for row in range(self.rows):
            ll.llama_memory_seq_rm(memory, row, self.context, -1)
        tokens, position = self.first, self.context
        while True:
            yield tokens
            self._run([(token, position, row, True) for row, token in enumerate(tokens)])
            tokens, position = [self._best(row) for row in range(self.rows)], position + 1

    def _prefill(self, row: int, prompt: list[int]) -> int:
        last = len(prompt) - 1
        self._run([(token, i, row, i == last) for i, token in enumerate(prompt)])
        return self._best(last)

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """entries: (token, position, row, whether its logits are asked for)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if code := ll.llama_decode(self.ctx, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _best(self, entry: int) -> int:
        logits = ll.llama_get_logits_ith(self.ctx, entry)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def convert(source: str, target: str) -> None:
    params = ll.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = BF16_FILE, True
    if code := ll.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    if sys.argv[1:2] == ["convert"]:
        convert(*sys.argv[2:])
    else:
        serve(lambda setting: Decoder(setting).decode, "weights of the file, keys and values f16")
