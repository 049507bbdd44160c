"""A program as people have it: DeepSpeed, at the ZeRO stage that its second word names.

Its losses are the last line.
"""

import json
import os
import sys

import deepspeed
import torch
from leaving import leave
from torch import nn


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": int(sys.argv[2])},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    random, losses = torch.Generator().manual_seed(int(os.environ["RANK"])), []
    for _ in range(6):
        x = torch.randn(8, 8, generator=random)
        loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if os.environ["RANK"] == "0":
        print(json.dumps({"backend": torch.distributed.get_backend(), "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
    leave()
