"""A program as people have it: Lightning's Trainer. Its losses are the last line."""

import json
import os
import sys

import lightning
import torch
from leaving import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), []

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(self.all_gather(loss.detach()).mean()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        default_root_dir=sys.argv[1],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        print(json.dumps({"backend": torch.distributed.get_backend(), "losses": module.losses}), flush=True)


if __name__ == "__main__":
    main()
    leave()
