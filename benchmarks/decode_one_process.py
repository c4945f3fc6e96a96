"""A peer of decode.py: Hugging Face, StaticCache, torch.compile and freezing, one process, all cores."""

import inspect
from collections.abc import Iterator

import torch
import torch._inductor.config
from decode_protocol import serve
from transformers import StaticCache

from numadist import models


class Decoder:
    """Holds a context and decodes from it again and again."""

    def __init__(self, setting: dict):
        torch.set_num_threads(len(setting["cpus"]))
        self.model = models.build(setting["model"], getattr(torch, setting["dtype"]))
        prompts = torch.tensor(setting["prompts"])
        self.context = prompts.shape[1]
        # As many slots as ours reads at this context.
        slots = -(-(self.context + setting["tokens"] + 1) // 64) * 64
        self.cache = StaticCache(config=self.model.config, max_cache_len=slots)
        accepted = inspect.signature(self.model.forward).parameters
        self.inputs = {"cache" if "cache" in accepted else "past_key_values": self.cache, "use_cache": True}
        self.first = self.model(prompts, logits_to_keep=1, **self.inputs).logits[:, -1].argmax(-1)
        torch._inductor.config.freezing = True
        self.step = torch.compile(self.model, dynamic=False)

    def decode(self) -> Iterator[list[int]]:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
        token, position = self.first, self.context
        while True:
            yield token.tolist()
            positions = torch.full((len(token), 1), position)
            logits = self.step(token[:, None], position_ids=positions, **self.inputs).logits
            token, position = logits[:, -1].argmax(-1), position + 1


if __name__ == "__main__":
    with torch.no_grad():
        serve(lambda setting: Decoder(setting).decode, "as the model")
