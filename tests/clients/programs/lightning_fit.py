"""Lightning's Trainer with DDP or, by `fsdp`, FSDP2 (ModelParallelStrategy): FOLDER [fsdp]; the losses of six steps."""

import json
import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Fit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if "fsdp" in sys.argv:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(self.all_gather(loss.detach()).sum().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    strategy = (
        ModelParallelStrategy(2, 1, process_group_backend="gloo")
        if "fsdp" in sys.argv
        else DDPStrategy(process_group_backend="gloo")
    )
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    model = Fit()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=sys.argv[1],
    )
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    if os.environ["RANK"] == "0":
        print("RESULT", json.dumps(model.losses), flush=True)
    torch.distributed.destroy_process_group()
