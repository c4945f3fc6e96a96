"""int8 weights on a real model: what benchmarks/int8_quality.py measures, on less text."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist.kernels import int8

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


@pytest.mark.nightly
def test_smollm2_predicts_text_as_well_with_int8_weights():
    if not int8.takes(2, torch.bfloat16):
        return  # this machine decodes on bf16 weights, and says so: test_int8_decoding.py
    from int8_quality import measure

    seen = measure(num_rows=64, num_tokens=4)
    assert seen.loss_int8 < 1.02 * seen.loss_bf16
    assert seen.same > 0.85
