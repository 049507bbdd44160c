"""One replica of a program that trains with torchft: its own job, which others join and leave.

argv: its name, the step at which it dies, or 0, and the file to write. It ends once three take part at a step beyond
LAST: all of them do at the same one. It writes how many took part in its steps, and the sum of its weights.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer

from hetctl.torchft import ProcessGroupHet

LAST = 40
name, dies, took_part = sys.argv[1], int(sys.argv[2]), set()
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
    took_part.add(manager.num_participants())
said = {
    "took part": sorted(took_part),
    "weights": sum(float(p.detach().double().abs().sum()) for p in net.parameters()),
}
Path(sys.argv[3]).write_text(json.dumps(said))
manager.shutdown()
