"""Tokens of compiled models in 16 bits on CPUs of every kind, by limits on our kernels, torch's and oneDNN's."""

import os
import subprocess
import sys

import pytest

from numadist import _native

# What each library calls the same limit.
LIMITS = {
    "portable": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
PROGRAM = """
import logging
import sys

import torch

import numadist
from numadist import models
from numadist.lowering.packing import has_halves
from numadist.lowering.recorded_step import ReplayedStep

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
dtype = getattr(torch, sys.argv[1])
prompts = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(1, 25))]
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}

def model_of(name, changes, dtype):
    torch.manual_seed(0)
    return models.build(name, dtype, initializer_range=0.3, **changes)

def tokens(model, compile):
    generator = numadist.Generator(model, max_batch_size=3, max_length=64, compile=compile)
    return generator, generator.generate(prompts, max_new_tokens=12, do_sample=False, eos_token_id=())

for name, changes in [("gpt2-tiny", {"n_head": 4, "n_embd": 128}), ("llama-tiny", {"hidden_size": 128, **heads})]:
    _, wanted = tokens(model_of(name, changes, dtype), False)
    generator, seen = tokens(model_of(name, changes, dtype), True)
    step = generator.runner._forward
    assert has_halves(step.prefill) and has_halves(step.decode)
    decoding = [ready for (_, one_token, _), ready in step._ready.items() if one_token]
    assert decoding and all(isinstance(ready, ReplayedStep) for ready in decoding), "every call can be recorded"
    exact = model_of(name, changes, dtype).double()
    for row, other in zip(wanted, seen, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(row, other, strict=True)) if a != b]
        if differ:  # only where the two are as good as each other, and what follows is another text
            at = differ[0]
            logits = exact(torch.tensor([row[:at]])).logits[0, -1]
            gap = (logits[row[at]] - logits[other[at]]).abs()
            assert gap <= 0.02 * logits.abs().max(), f"{name}: {other} for {row}"
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("limit", LIMITS)
def test_compiled_tokens_in_16_bits_equal_those_of_the_plain_model(limit, dtype, tmp_path):
    if limit not in _native.supported_isas():
        pytest.skip(f"needs a CPU with {limit} that NUMADIST_MAX_ISA allows")
    # Code compiled under one limit gives other sums under another.
    own = {"NUMADIST_MAX_ISA": limit, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype],
        capture_output=True,
        text=True,
        env={**os.environ, **LIMITS[limit], **own},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{dtype} weights widened to f32 by our {limit} kernels" in done.stdout
