"""A program as people have it: a loop of one's own over Lightning's Fabric. Its losses are the last line."""

import json
import os
import sys

import torch
from leaving import leave
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(devices=local, num_nodes=int(os.environ["WORLD_SIZE"]) // local, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for _ in range(2):
        for batch, target in loader:
            loss = nn.functional.mse_loss(net(batch), target)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(fabric.all_reduce(loss.detach())))
    fabric.save(os.path.join(sys.argv[1], "checkpoint.pt"), {"net": net})
    if fabric.global_rank == 0:
        print(json.dumps({"backend": torch.distributed.get_backend(), "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
    leave()
