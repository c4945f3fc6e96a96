# guest two_nodes: numarun --backend numa
"""FSDP2, and a tensor-parallel model of transformers, on two real nodes: what a rank holds is on its node."""

import json
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import numadist


def pages(model: nn.Module) -> dict[str, dict[int, int]]:
    """Of this rank's part of every parameter."""
    parts = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: numadist.page_nodes(part.detach()) for name, part in parts.items()}


dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
trained = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64))
fully_shard(trained)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    loss = trained(torch.ones(2, 64) * (rank + 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item())

config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=1024,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
)
torch.manual_seed(0)
whole = transformers.LlamaForCausalLM(config).eval()
names = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(names)
if rank == 0:
    whole.save_pretrained(names[0])
dist.barrier()
# Without disable_mmap what a plan cuts by rows stays in the page cache, on the node that read the file first.
split = transformers.LlamaForCausalLM.from_pretrained(
    names[0], dtype=torch.float32, tp_plan="auto", disable_mmap=True
).eval()
ids = torch.arange(2, 10)[None]
with torch.no_grad():
    error = (split(ids).logits - whole(ids).logits).abs().max().item()

print(
    json.dumps(
        {
            "group": type(dist.group.WORLD).__name__,
            "losses": losses,
            "fsdp_pages": pages(trained),
            "split_pages": pages(split),
            "split_elements": sum(
                (p.to_local() if isinstance(p, DTensor) else p).numel() for p in split.parameters()
            ),
            "whole_elements": sum(p.numel() for p in whole.parameters()),
            "error": error,
        }
    ),
    flush=True,
)
dist.barrier()
dist.destroy_process_group()
