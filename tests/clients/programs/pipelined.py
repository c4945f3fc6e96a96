"""torch.distributed.pipelining, one stage a rank: losses of three steps of GPipe and of 1F1B."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def main() -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(rank)
        part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        stage = PipelineStage(part, rank, world, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        torch.manual_seed(100)
        x, y = torch.randn(8, 16), torch.randn(8, 16)
        for _ in range(3):
            found: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(**({"target": y, "losses": found} if rank == world - 1 else {}))
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.stack(found).mean() if rank == world - 1 else torch.zeros(())
            dist.broadcast(loss, world - 1)
            losses.append(loss.item())
    return losses
