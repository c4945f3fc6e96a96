"""`numadist::packed_linear`: oneDNN's linear layer on packed weights that are an input of compiled code.

Inductor compiles `mkldnn::_linear_pointwise` only on weights that are constants of the graph, so a layer compiled once
for all layers cannot call it.
"""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("numadist", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor blob, Tensor? bias, str activation, str algorithm) -> Tensor")
_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


@torch.library.impl(_LIBRARY, "packed_linear", "MkldnnCPU")
def _packed_linear(x: Tensor, blob: Tensor, bias: Tensor | None, activation: str, algorithm: str) -> Tensor:
    """activation and algorithm: by oneDNN's names, as _linear_pointwise takes them."""
    return _linear_pointwise(x, blob, bias, activation, [], algorithm)


@torch.library.register_fake("numadist::packed_linear", lib=_LIBRARY)
def _packed_linear_fake(
    x: Tensor, blob: Tensor, bias: Tensor | None, activation: str, algorithm: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], blob.shape[0]))
