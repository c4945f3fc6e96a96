"""What int8 weights cost in quality: SmolLM2 predicts this repository's own documents, token by token.

    python benchmarks/int8_quality.py [--rows 16] [--tokens 96]

The decode graph itself runs, with bf16 weights and with int8 ones, on rows of consecutive tokens. Loss: nats a token.
Same: tokens whose most likely successor is that of bf16 weights.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from numadist import models
from numadist.generation.step import CapturedStep, capture_step
from numadist.graph.passes import run_passes
from numadist.pipeline import passes
from numadist.pipeline.stages import copy_of

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Quality:
    loss_bf16: float
    loss_int8: float
    same: float  # share of the predictions, 0 to 1


def measure(num_rows: int, num_tokens: int) -> Quality:
    """Of num_rows pieces of text, num_tokens predictions each."""
    text_BT = passages(num_rows, num_tokens + 1)
    step = capture_step(models.build("smollm2", torch.bfloat16))
    run_passes(step.gm, passes.PACKED)
    quantized = replace(step, captured=copy_of(step.captured))
    run_passes(quantized.gm, passes.DECODE_INT8)
    if not any(n.target is torch.ops.numadist.int8_linear.default for n in quantized.gm.graph.nodes):
        raise SystemExit("this CPU does not decode on int8 weights: it needs AVX512-BF16 and AVX512-VBMI")
    target_BT = text_BT[:, 1:]
    bf16_BTV, int8_BTV = (predictions(s, text_BT[:, :-1]) for s in (step, quantized))
    return Quality(
        loss(bf16_BTV, target_BT),
        loss(int8_BTV, target_BT),
        float((bf16_BTV.argmax(-1) == int8_BTV.argmax(-1)).float().mean()),
    )


def passages(num_rows: int, num_tokens: int) -> Tensor:
    """Tokens of the documents, [num_rows, num_tokens]."""
    tokenizer = models.tokenizer("smollm2")
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    ids = tokenizer(text).input_ids[: num_rows * num_tokens]
    return torch.tensor(ids).view(num_rows, num_tokens)


@torch.no_grad()
def predictions(step: CapturedStep, text_BT: Tensor) -> Tensor:
    """Logits after every token, [B, T, V], decoded one token at a time."""
    num_rows, num_tokens = text_BT.shape

    def empty(size: str) -> list[Tensor]:
        return [
            torch.zeros(num_rows, k.num_heads, num_tokens + 1, getattr(k, size), dtype=k.dtype)
            for k in step.layers
        ]

    keys, values = empty("key_size"), empty("value_size")
    logits = []
    for t in range(num_tokens):
        positions = torch.full((num_rows, 1), t)
        logits.append(step.gm(text_BT[:, t : t + 1], positions, positions.clone(), keys, values).float())
    return torch.stack(logits, 1)


def loss(logits_BTV: Tensor, target_BT: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    seen = measure(options.rows, options.tokens)
    print(f"smollm2, {options.rows * options.tokens} predictions")
    print(
        f"loss  bf16 {seen.loss_bf16:.4f}  int8 {seen.loss_int8:.4f}  ({seen.loss_int8 / seen.loss_bf16 - 1:+.2%})"
    )
    print(f"same  {seen.same:.1%}")


if __name__ == "__main__":
    main()
