"""Quantized weights on a real model: what benchmarks/quality.py measures, on less text."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

from numadist import models

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


@pytest.mark.nightly
def test_smollm2_predicts_text_as_well_on_codes():
    from quality import measure

    seen = measure(str(models.smollm2_path()), ["none", "auto", "int8", "int4"], 2, 256)
    assert abs(seen["auto"] / seen["none"] - 1) < 0.005
    assert abs(seen["int8"] / seen["none"] - 1) < 0.005
    assert seen["int4"] / seen["none"] < 1.05
