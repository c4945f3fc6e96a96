# guest two_nodes: python
"""A model split over two nodes inside one process: where each thread group runs and where its shard's pages are."""

import json
import os

import torch
from torch import nn

import numadist
from numadist import inprocess

WIDTH, HIDDEN = 64, 2048

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).eval()
batch = torch.randn(3, WIDTH)
split = inprocess.shard(model, batch)
with torch.no_grad():
    error = (split(batch) - model(batch)).abs().max().item()

numadist.patch_clone()
print(
    json.dumps(
        {
            "error": error,
            "cpus": split._groups.run(lambda i: sorted(os.sched_getaffinity(0))),
            "shapes": [list(dict(g.named_parameters())["0.weight"].shape) for g in split.local],
            "pages": [{n: numadist.page_nodes(p) for n, p in g.named_parameters()} for g in split.local],
            "patched_clone": [numadist.page_nodes(torch.ones(300_000).clone(numa_node=n)) for n in (0, 1)],
        }
    ),
    flush=True,
)
split.close()
