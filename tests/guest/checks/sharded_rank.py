# guest two_nodes: numarun
"""A model sharded over two real nodes: sums are right, every page of shards and KV tensors is on its rank's node."""

import json

import torch
import torch.distributed as dist
from torch import nn

import numadist
from numadist.generation.kv import KvTensors

WIDTH, HIDDEN = 64, 2048

dist.init_process_group("numa")
rank = dist.get_rank()

x = torch.arange(5000, dtype=torch.float32) * (rank + 1)
dist.all_reduce(x)
wrong_sums = int((x != torch.arange(5000, dtype=torch.float32) * 3).sum())

placed = {}
for node in (0, 1):
    there = numadist.clone(torch.ones(300_000), numa_node=node)
    placed[node] = numadist.page_nodes(there)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).eval()
batch = torch.randn(3, WIDTH)
with torch.no_grad():
    expected = model(batch)
    sharded = numadist.shard(model, batch)
    error = (sharded(batch) - expected).abs().max().item()

kv = KvTensors([(3, 64, torch.bfloat16)] * 2, num_rows=2, num_slots=128)

print(
    json.dumps(
        {
            "wrong_sums": wrong_sums,
            "clone_pages": placed,
            "error": error,
            "shard_pages": {name: numadist.page_nodes(p) for name, p in sharded.local.named_parameters()},
            "kv_pages": kv.page_nodes(),
            "kv_bytes": kv.num_bytes,
            "shard_shapes": {name: list(p.shape) for name, p in sharded.local.named_parameters()},
        }
    ),
    flush=True,
)
dist.destroy_process_group()
