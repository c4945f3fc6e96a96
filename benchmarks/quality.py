"""What quantized weights cost in quality: the loss over a fixed text, computed on codes and on widened weights.

    python benchmarks/quality.py MODEL [--formats none auto int8 int4] [--llama-perplexity PROGRAM]

MODEL: a .gguf file or a folder. Loss: nats a token, of the second half of every chunk of this repository's documents,
each chunk read anew behind the model's bos token. llama.cpp's program llama-perplexity does the same on the same file
and text, if it is given; its tokens are as many as ours.
"""

import argparse
import math
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import numadist
from numadist.generation.pretrained import load_tokenizer, open_pretrained

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
FORMATS = ("none", "auto", "int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--llama-perplexity", metavar="PROGRAM")
    options = parser.parse_args()
    losses = measure(options.model, options.formats, options.chunks, options.context)
    if options.llama_perplexity:
        losses["llama.cpp"] = of_llama_cpp(options)
    first = next(iter(losses.values()))
    print(f"{options.model}, {options.chunks} chunks of {options.context} tokens")
    for name, loss in losses.items():
        print(f"{name:10} {loss:.5f}  {loss / first - 1:+.3%}")


def measure(model: str, formats: list[str], num_chunks: int, context: int) -> dict[str, float]:
    """Loss by format, on one rank."""
    chunks = chunks_of(model, num_chunks, context)
    losses = {}
    if not dist.is_initialized():
        dist.init_process_group("numa", store=dist.HashStore(), rank=0, world_size=1)
    for name in formats:
        found = open_pretrained(model, torch.float32)
        sharded = numadist.shard(
            found.model,
            {"input_ids": chunks[:1], "use_cache": False},
            weights=found.weights,
            quantization=None if name == "none" else name,
        )
        with torch.no_grad():
            losses[name] = sum(
                loss(sharded(input_ids=chunk[None], use_cache=False).logits, chunk) for chunk in chunks
            ) / len(chunks)
    return losses


def text() -> str:
    return "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))


def chunks_of(model: str, num_chunks: int, context: int) -> torch.Tensor:
    """[chunks, context]; the first token of each is bos, where the model has one."""
    tokenizer = load_tokenizer(model)
    ids = tokenizer(text()).input_ids[: num_chunks * context]
    chunks = torch.tensor(ids).view(num_chunks, context)
    if tokenizer(" ").input_ids[0] == tokenizer.bos_token_id:
        chunks[:, 0] = tokenizer.bos_token_id
    return chunks


def loss(logits_1TV: torch.Tensor, chunk_T: torch.Tensor) -> float:
    """Of the tokens behind the middle, in nats a token."""
    half = len(chunk_T) // 2
    return float(torch.nn.functional.cross_entropy(logits_1TV[0, half:-1].float(), chunk_T[half + 1 :]))


def of_llama_cpp(options: argparse.Namespace) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text())
        file.flush()
        command = [options.llama_perplexity, "-m", options.model, "-f", file.name, "-c", str(options.context)]
        command += ["-b", str(options.context), "--chunks", str(options.chunks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return math.log(float(re.findall(r"PPL = ([0-9.]+)", done.stdout + done.stderr)[-1]))


if __name__ == "__main__":
    main()
