"""torch.distributed.checkpoint of an FSDP2 model: saved, saved in the background, loaded into another."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 8))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def main() -> list[float]:
    folder, x = sys.argv[1], torch.linspace(-1, 1, 16)
    model = sharded(seed=0)
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/now")
    dcp.async_save(get_model_state_dict(model), checkpoint_id=f"{folder}/later").result()
    values = model(x).tolist()
    for name in ("now", "later"):
        other = sharded(seed=7)
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(other, state)
        if other(x).tolist() != values:
            raise AssertionError(f"{name}: the loaded model says {other(x).tolist()}, the saved one {values}")
    return values
