"""On PYTHONPATH: vLLM takes the machine for one without AVX-512, where it has no sum of its own in shared memory."""

import torch

torch.cpu._is_avx512_supported = lambda: False
