"""The baseline of decode.py: Hugging Face, StaticCache, torch.compile and freezing, one process, all cores.

Reads one JSON line a question on stdin, answers one on stdout.
"""

import inspect
import itertools
import json
import statistics
import sys
import time

import torch
import torch._inductor.config
from transformers import StaticCache

from numadist import binding, models


class Decoder:
    """Holds a context and decodes from it again and again."""

    def __init__(self, setting: dict):
        binding.bind_cpus(setting["cpus"])
        binding.bind_memory("local", [])
        torch.set_num_threads(len(setting["cpus"]))
        self.model = models.build(setting["model"], getattr(torch, setting["dtype"]))
        self.num_tokens = setting["tokens"]
        prompts = torch.tensor(setting["prompts"])
        self.context = prompts.shape[1]
        # As many slots as ours reads at this context.
        slots = -(-(self.context + self.num_tokens + 1) // 64) * 64
        self.cache = StaticCache(config=self.model.config, max_cache_len=slots)
        accepted = inspect.signature(self.model.forward).parameters
        self.inputs = {"cache" if "cache" in accepted else "past_key_values": self.cache, "use_cache": True}
        self.first = self.model(prompts, logits_to_keep=1, **self.inputs).logits[:, -1].argmax(-1)
        torch._inductor.config.freezing = True
        self.step = torch.compile(self.model, dynamic=False)

    def decode(self) -> tuple[list[list[int]], float]:
        """Tokens from the context on [B][N], and the median of a step's seconds."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
        token, tokens, times = self.first, [self.first], [time.perf_counter()]
        for i in range(self.num_tokens):
            positions = torch.full((len(token), 1), self.context + i)
            logits = self.step(token[:, None], position_ids=positions, **self.inputs).logits
            token = logits[:, -1].argmax(-1)
            tokens.append(token)
            times.append(time.perf_counter())
        seconds = statistics.median(b - a for a, b in itertools.pairwise(times))
        return torch.stack(tokens[:-1], dim=1).tolist(), seconds


def main() -> None:
    with torch.no_grad():
        decoder = Decoder(json.loads(sys.stdin.readline()))
        tokens, _ = decoder.decode()
        print(json.dumps({"tokens": tokens}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"step_s": decoder.decode()[1]}), flush=True)


if __name__ == "__main__":
    main()
