"""A loop around accelerate's Accelerator, with DDP or, by `fsdp`, FSDP2: gathered losses, and a gathered object."""

import json
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "fsdp" in sys.argv else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 1))
    x = torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for inputs, targets in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).sum().item())
    ranks = gather_object([accelerator.process_index])
    if accelerator.is_main_process:
        print("RESULT", json.dumps({"losses": losses, "ranks": ranks}), flush=True)
    accelerator.end_training()
