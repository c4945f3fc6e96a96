"""One rank of `numadist generate`. Rank 0 reads the prompt and writes the text; all compute."""

import contextlib
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from numadist.commands.generate import parser
from numadist.errors import GenerateError, NumadistError
from numadist.generation.generator import Generator
from numadist.generation.peers import peers_of
from numadist.generation.pretrained import load_tokenizer, open_pretrained
from numadist.generation.step import capture_step
from numadist.generation.streamed_text import StreamedText

_LEAST_ROOM = 512
# Garbage is looked for after so many, as compiling makes millions.
_NEW_OBJECTS = 100_000


def run(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    began = time.monotonic() - _age_s()
    # Ctrl-C and the end of our reader end a rank without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = parser().parse_args(argv)
    dist.init_process_group("numa")
    try:
        _generate(options, began)
    except NumadistError as error:
        if dist.get_rank() == 0:
            print(f"numadist generate: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    finally:
        with contextlib.suppress(NumadistError):
            dist.destroy_process_group()
    return 0


def _age_s() -> float:
    """Of this process, so that importing torch counts too (man 5 proc: starttime in clock ticks since boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _generate(options: Any, began: float) -> None:
    found = open_pretrained(
        options.model, dtype=None if options.dtype == "auto" else getattr(torch, options.dtype)
    )
    tokenizer, ids = None, [0]
    if dist.get_rank() == 0:  # while another rank captures the model
        tokenizer = load_tokenizer(options.model)
        ids = _prompt(tokenizer, options)
    step = capture_step(found.model)
    length = torch.tensor([len(ids)])
    dist.broadcast(length, 0)
    generator = Generator.of_captured(
        found.model,
        step,
        peers_of(None),
        weights=found.weights,
        max_batch_size=1,
        max_length=room(int(length) + options.max_new_tokens, found.model.config, options.compile),
        quantization=None if options.quantization == "none" else options.quantization,
        compile=options.compile,
    )
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
    gc.enable()
    loaded = time.monotonic()
    times: list[float] = []
    text = StreamedText(tokenizer) if tokenizer is not None else None

    def on_token(row: int, token: int) -> None:
        times.append(time.monotonic())
        assert text is not None  # only rank 0 is told
        _write(text.put(token))

    generator.generate(
        [ids],
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        temperature=options.temperature or None,
        seed=options.seed,
        on_token=on_token,
    )
    if text is not None:
        _write(text.end() + "\n")
    if options.stats:
        _stats(generator, len(ids), began, loaded, times)


def room(tokens: int, config: Any, compile: bool) -> int:
    """Tokens that a row has room for. Compiled code depends on it, so then it is one of few numbers."""
    if not compile:
        return tokens
    size = _LEAST_ROOM
    while size < tokens:
        size *= 2
    limit = getattr(config, "max_position_embeddings", None) or size
    return max(tokens, min(size, limit))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _prompt(tokenizer: Any, options: Any) -> list[int]:
    text = sys.stdin.read() if options.prompt is None else options.prompt
    if not text:
        raise GenerateError("no prompt: give --prompt TEXT, or text on standard input")
    if not options.chat:
        return list(tokenizer(text)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise GenerateError(f"--chat: {options.model} has no chat template")
    message = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _stats(generator: Generator, num_prompt: int, began: float, loaded: float, times: list[float]) -> None:
    """Collective: what every rank holds, told by rank 0."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (generator.local_bytes, generator.kv_bytes, process_pages()))
    if dist.get_rank() != 0 or not times:
        return
    told = [
        f"first token     {times[0] - began:.2f} s after the start: {loaded - began:.2f} s to load, "
        f"{times[0] - loaded:.2f} s for {num_prompt} tokens of the prompt",
        f"then            {_rate(times)}",
    ]
    for rank, (weights, kv, pages) in enumerate(held):
        where = ", ".join(f"node {node} {num}" for node, num in pages.items())
        told.append(
            f"rank {rank}          {weights / 1e6:.1f} MB of weights, {kv / 1e6:.1f} MB of KV; pages: {where}"
        )
    print("\n".join(told), file=sys.stderr)


def _rate(times: list[float]) -> str:
    if len(times) < 2:
        return "one token in all"
    return f"{(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s, {len(times)} tokens in all"


def process_pages() -> dict[int, int]:
    """{node: pages} of all memory of this process but for files, as the kernel tells (man 5 numa)."""
    counts: Counter[int] = Counter()
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:  # a kernel without NUMA
        return {}
    for line in lines:
        words = line.split()
        if any(word.startswith("file=") for word in words):
            continue
        for word in words:
            node, _, pages = word.partition("=")
            if node[:1] == "N" and node[1:].isdecimal():
                counts[int(node[1:])] += int(pages)
    return dict(sorted(counts.items()))
