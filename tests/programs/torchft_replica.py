"""One replica of a program that trains with torchft: its own job, which others join and leave.

argv: its name, and the step at which it dies, or 0. It ends once three take part at a step beyond LAST: all of them do
at the same one. What it prints is one line a step, how many replicas took part, and then the sum of its weights.
"""

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer

from hetctl.torchft import ProcessGroupHet

LAST = 40
name, dies = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def load(state: dict[str, Any]) -> None:
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])


def state() -> dict[str, Any]:
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


manager = Manager(
    pg=ProcessGroupHet(timeout=timedelta(seconds=20), island=name),
    min_replica_size=2,
    load_state_dict=load,
    state_dict=state,
    replica_id=name,
    timeout=timedelta(seconds=20),
    hostname="localhost",
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, torch.optim.AdamW(net.parameters()))
draw = torch.Generator().manual_seed(sum(name.encode()))
while manager.current_step() <= LAST or manager.num_participants() < 3:
    optimizer.zero_grad()
    x = torch.randn(4, 8, generator=draw)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    if 0 < dies <= manager.current_step():
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    print(f"step {manager.current_step()} of {manager.num_participants()}", flush=True)
print(f"weights {sum(float(p.double().abs().sum()) for p in net.parameters()):.12f}", flush=True)
manager.shutdown()
