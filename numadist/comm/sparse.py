"""Sums of sparse tensors: gather everybody's entries and add them up."""

from collections.abc import Callable

import torch
from torch import Tensor

from numadist.comm.tensors import store


def sum_sparse_(t: Tensor, all_gather: Callable[[Tensor], list[Tensor]]) -> None:
    """Replace a COO tensor by its sum over ranks. all_gather(x): everybody's x, of one shape, in rank order.

    Cost: three all_gathers, of the longest rank's number of entries.
    """
    mine = t.detach().coalesce()
    counts = [int(n) for n in all_gather(torch.tensor([mine._nnz()]))]
    indices = all_gather(_padded(mine.indices().t().contiguous(), max(counts)))
    values = all_gather(_padded(mine.values(), max(counts)))
    total = torch.sparse_coo_tensor(
        torch.cat([i[:n] for i, n in zip(indices, counts, strict=True)]).t(),
        torch.cat([v[:n] for v, n in zip(values, counts, strict=True)]),
        t.shape,
    )
    store(t, total.coalesce())


def _padded(x: Tensor, rows: int) -> Tensor:
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: len(x)] = x
    return padded
