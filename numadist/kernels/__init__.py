"""Our own operators where torch's are slow for inference on a CPU. They run on torch's OpenMP threads."""

import torch  # noqa: F401  loads the OpenMP runtime that is taken over

from numadist import _native

_native.use_openmp()
