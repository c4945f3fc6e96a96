"""Continue prompts with a language model split over pinned ranks, each holding the KV cache of its heads.

    numarun --nproc-per-socket 2 examples/generate.py
    numarun --nproc-per-socket 2 examples/generate.py --check

With --check every prompt is also continued by Hugging Face's own generate in one process; the run fails if a token
differs.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

import numadist
from numadist import models

PROMPTS = [
    "The capital of France is",
    "Water is made of hydrogen and",
    "Once upon a time, in a village by the sea, there lived a",
    "The first three prime numbers are 2, 3 and",
    "Q: Why is the sky blue?\nA:",
    "def fibonacci(n):",
    "A server with two sockets has two memory controllers, so a program that reads the other socket's memory is",
    "Dear",
]


def main() -> int:
    options = parse_options()
    dist.init_process_group("numa")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = models.build(options.model, getattr(torch, options.dtype))
    texts, prompts = load_prompts(options.model, model.config.vocab_size)
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    longest = max(map(len, prompts)) + options.max_new_tokens
    generator = numadist.Generator(
        model, max_batch_size=len(prompts), max_length=longest, compile=options.compile
    )
    held = [None] * num_ranks
    dist.all_gather_object(held, (generator.local_bytes, generator.kv_bytes, generator.kv_page_nodes()))

    together, seconds = timed(generator, prompts, options)
    alone, seconds_alone = [], 0.0
    for prompt in prompts:
        (answer,), taken = timed(generator, [prompt], options)
        alone.append(answer)
        seconds_alone += taken
    if rank == 0:
        show(options.model, texts, prompts, together)
        new = sum(map(len, together)) - sum(map(len, prompts))
        print(
            f"\n{options.model}, {options.dtype}, {'compiled' if options.compile else 'eager'}, {num_ranks} ranks"
        )
        print(
            f"weights per rank  {', '.join(f'{w / 1e6:.1f} MB' for w, *_ in held)} of {whole_bytes / 1e6:.1f} MB"
        )
        print(f"KV per rank       {', '.join(f'{kv / 1e6:.1f} MB' for _, kv, _ in held)}")
        print(f"KV pages by node  {', '.join(f'r{r} {nodes}' for r, (*_, nodes) in enumerate(held))}")
        print(
            f"tokens/s          {new / seconds:.1f} in a batch of {len(prompts)}, {new / seconds_alone:.1f} one by one"
        )
    wrong = check(model, prompts, together, alone, options) if options.check else []
    if rank == 0 and options.check:
        verdict = "; ".join(wrong) or "identical, in a batch and one by one"
        print(
            f"{len(prompts)} prompts x {options.max_new_tokens} tokens against Hugging Face generate: {verdict}"
        )
    dist.destroy_process_group()
    return 1 if wrong else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", choices=models.NAMES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="compile the steps, with weights packed")
    parser.add_argument("--check", action="store_true", help="compare with Hugging Face generate")
    return parser.parse_args()


def load_prompts(model: str, vocabulary_size: int) -> tuple[list[str], list[list[int]]]:
    """Prompts as text and as token ids; random ids for models with random weights."""
    tokenizer = models.tokenizer(model)
    if tokenizer is not None:
        return PROMPTS, [tokenizer(text)["input_ids"] for text in PROMPTS]
    draw = torch.Generator().manual_seed(0)
    lengths = range(3, 27, 3)
    ids = [torch.randint(vocabulary_size, (n,), generator=draw).tolist() for n in lengths]
    return [f"{n} random tokens" for n in lengths], ids


def timed(generator: numadist.Generator, prompts: list[list[int]], options) -> tuple[list[list[int]], float]:
    dist.barrier()
    begin = time.perf_counter()
    answers = generator.generate(prompts, max_new_tokens=options.max_new_tokens, do_sample=False)
    return answers, time.perf_counter() - begin


def show(model: str, texts: list[str], prompts: list[list[int]], answers: list[list[int]]) -> None:
    tokenizer = models.tokenizer(model)
    for text, prompt, answer in zip(texts, prompts, answers, strict=True):
        new = answer[len(prompt) :]
        print(f"{text!r} -> {tokenizer.decode(new)!r}" if tokenizer is not None else f"{text} -> {new}")


def check(model, prompts, together, alone, options) -> list[str]:
    """Differences from Hugging Face generate, on every rank; each rank continues its share of the prompts alone."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for i in range(rank, len(prompts), num_ranks):
        ids = torch.tensor([prompts[i]])
        mask = torch.ones_like(ids)
        (expected,) = model.generate(
            ids, attention_mask=mask, max_new_tokens=options.max_new_tokens, do_sample=False
        ).tolist()
        for how, answers in (("in a batch", together), ("alone", alone)):
            if answers[i] != expected:
                first = next(
                    (t for t, (a, b) in enumerate(zip(answers[i], expected, strict=False)) if a != b), "end"
                )
                wrong.append(f"prompt {i} {how} differs from token {first} on")
    everybody = [None] * num_ranks
    dist.all_gather_object(everybody, wrong)
    return [difference for differences in everybody for difference in differences]


if __name__ == "__main__":
    sys.exit(main())
