"""llama.cpp by llama-cpp-python, one process, all cores. Imports nothing of ours: its interpreter may be another one.

As a program, `llama_context.py GGUF KV ROWS TOKENS THREADS` is the prefill peer of `numadist compare`: writes the size
of the vocabulary (int32) when it is ready, then for every ROWS x TOKENS token ids (int32) on stdin the logits of each
row's last position (float32).
"""

import os
import sys

import llama_cpp as ll
import numpy as np

KV_TYPES = {"f32": 0, "f16": 1}  # ggml_type
Entry = tuple[int, int, int, bool]  # token, position, row, whether its logits are asked for


class LlamaContext:
    """A model and the keys and values of `rows` sequences of up to `slots` tokens; `at_once`: tokens of one call."""

    def __init__(self, gguf: str, rows: int, slots: int, at_once: int, threads: int, kv: str):
        ll.llama_log_set(_log_errors, None)
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(gguf.encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx = rows * (-(-slots // 256) * 256)
        params.n_seq_max, params.n_batch, params.n_ubatch = rows, at_once, at_once
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv]
        self.ctx = ll.llama_init_from_model(self.model, params)
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(at_once, 0, 1)

    def run(self, entries: list[Entry]) -> None:
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if code := ll.llama_decode(self.ctx, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def logits(self, entry: int) -> np.ndarray:
        """[vocabulary], of an entry of the last run that asked for them; valid until the next run."""
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self.ctx, entry), (self.vocabulary,))

    def forget(self, row: int, position: int) -> None:
        """Drop what the row holds from `position` on."""
        ll.llama_memory_seq_rm(ll.llama_get_memory(self.ctx), row, position, -1)


@ll.llama_log_callback
def _log_errors(level, text, data):
    if level == 4:  # errors; 5 continues a line of any level
        sys.stderr.write(text.decode())


def main(gguf: str, kv: str, *numbers: str) -> None:
    rows, tokens, threads = map(int, numbers)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print what they like
    context = LlamaContext(gguf, rows, tokens, rows * tokens, threads, kv)
    places = [(position, row, position == tokens - 1) for row in range(rows) for position in range(tokens)]
    answers.write(np.int32(context.vocabulary).tobytes())
    answers.flush()
    while ids := sys.stdin.buffer.read(4 * rows * tokens):
        for row in range(rows):
            context.forget(row, 0)
        given = np.frombuffer(ids, np.int32).tolist()
        context.run([(token, *place) for token, place in zip(given, places, strict=True)])
        for row in range(rows):
            answers.write(context.logits(row * tokens + tokens - 1).tobytes())
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[2:])
