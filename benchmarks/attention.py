"""Is our attention of a prefill faster than torch's?

    python benchmarks/attention.py [--dtype float32] [--threads N] [--out FILE]

NUMADIST_MAX_ISA, ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA limit what both may use. Both take turns; times are medians
over rounds, ratios (torch's time / ours) are taken inside a round and shown with their range. Checks the result first.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from numadist._native import supported_isas

SHAPES = {  # batch, heads, KV heads, tokens, head dim; how it is masked
    "gpt2 8x128": ((8, 12, 12, 128, 64), "causal"),
    "gpt2 1x512": ((1, 12, 12, 512, 64), "causal"),
    "gpt2 1x1024": ((1, 12, 12, 1024, 64), "causal"),
    "bert-large 8x128": ((8, 16, 16, 128, 64), "none"),
    "bert-large 1x512": ((1, 16, 16, 512, 64), "none"),
    "gemma3 1x1024, window": ((1, 4, 1, 1024, 256), "window"),
    "llama-1b 1x1024": ((1, 32, 8, 1024, 64), "causal"),
}


def compare(shape: tuple[int, ...], kind: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    batch, heads, kv_heads, tokens, dim = shape
    q, k, v = (
        torch.randn(batch, tokens, n, dim, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads)
    )
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    mask = ((distance >= 0) & (distance < 512))[None, None] if kind == "window" else None
    is_causal, grouped = kind == "causal", heads != kv_heads

    def theirs() -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)

    def ours() -> torch.Tensor:
        return torch.ops.numadist.attention(q, k, v, mask, is_causal, dim**-0.5)

    inputs = (x.double() for x in (q, k, v))
    truth = sdpa(*inputs, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    allowed = 2 * (theirs().double() - truth).abs().max()
    assert (ours().double() - truth).abs().max() <= allowed, "the answers differ"
    times: dict[str, list[float]] = {"torch": [], "ours": []}
    for i in range(rounds):
        for name, call in [("torch", theirs), ("ours", ours)][:: 1 if i % 2 else -1]:
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    ratios = [a / b for a, b in zip(times["torch"], times["ours"], strict=True)]
    medians = {f"{name}_ms": statistics.median(t) for name, t in times.items()}
    return {**medians, "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="also write JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    print(f"{options.dtype}, {supported_isas()[0]}; torch {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'threads ' + str(options.threads):<24}{'torch':>10}{'ours':>10}   ratio")
    for name, (shape, kind) in SHAPES.items():
        r = compare(shape, kind, getattr(torch, options.dtype), options.rounds)
        spread = f"{r['ratio']:.2f} [{r['lowest']:.2f}-{r['highest']:.2f}]"
        print(f"{name:<24}{r['torch_ms']:>7.2f} ms{r['ours_ms']:>7.2f} ms   {spread}", flush=True)
        results.append({"shape": name, **r})
    if options.out:
        head = {"dtype": options.dtype, "isa": supported_isas()[0], "threads": options.threads}
        head |= {"torch": torch.__version__}
        options.out.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
