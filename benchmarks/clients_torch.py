"""One run of clients.py: transformers and torch's own parallelism. FOLDER; milliseconds of each, as JSON, by rank 0."""

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

NUM_TOKENS = 16


def fastest_ms(run: Callable[[], object], times: int) -> float:
    run()
    found = []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return 1e3 * min(found)


def main() -> dict[str, float]:
    folder, ms = sys.argv[1], {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, tp_plan="auto"
    ).eval()
    for batch in (1, 8):
        ids = torch.arange(2, 2 + 5 * batch).reshape(batch, 5)

        def generate(num_tokens: int, ids: torch.Tensor = ids) -> object:
            return model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)

        whole = fastest_ms(lambda: generate(1 + NUM_TOKENS), 3)
        ms[f"decode, tp_plan, batch {batch}"] = (whole - fastest_ms(lambda: generate(1), 3)) / NUM_TOKENS
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in trained.model.layers:
        fully_shard(layer)
    fully_shard(trained)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    ids = torch.arange(2, 66).reshape(2, 32)

    def step() -> None:
        trained(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    ms["training step, FSDP2"] = fastest_ms(step, 5)
    return ms


if __name__ == "__main__":
    dist.init_process_group("gloo")
    measured = main()
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(measured), flush=True)
    dist.barrier()
    dist.destroy_process_group()
