"""The environment in which all systems of a benchmark run as on an older CPU.

It limits ours, torch, oneDNN and OpenVINO, which asks its own oneDNN; but OpenVINO's products in f32 by MLAS know no
limit and stay as they are, in its favour. llama.cpp knows none but that of its build.
"""

import os
import tempfile
from pathlib import Path

LIMITS = {
    "avx2": {"NUMADIST_MAX_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}


def limited(isa: str) -> dict[str, str]:
    """The variables, which libraries read when they are loaded. Compiled code has a folder of its own."""
    folder = Path(tempfile.gettempdir()) / f"numadist-benchmarks-{os.getuid()}-{isa}"
    return {**LIMITS[isa], "TORCHINDUCTOR_CACHE_DIR": str(folder)}
