"""One rank of DDP where the second island has half the first one's speed: stock, and with samples by speed.

hetctl run --emulate h200:1,mi325x:1@0.5 --bridge shm -- python tests/gpu/uneven_check.py [--width 4096]

Weights after ten steps, in fp64, are those of one process. Then steps of both ways in turn, in fp32: their ratio, and
that of the uneven step to what the ranks' own measured speeds say it takes. On CPUs nothing is slowed: speeds are one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hetctl.comm.operation.device import rank_device, synchronize
from hetctl.data import split, told_speeds
from hetctl.ddp import Weights, weigh, weighted_sum
from hetctl.trainer.ranks.emulated_device import at_speed

SAMPLES, BLOCKS, ROUNDS = 96, 6, 9


def model_of(width: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(BLOCKS))
    return nn.Sequential(*blocks).to(device, dtype)


def samples_of(width: int, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[SAMPLES, rows, width], the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, rows, width, generator=generator).to(device, dtype)


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    (net(x) - x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def off_one_process(device: torch.device, counts: list[int]) -> float:
    """The largest difference of any weight after ten steps."""
    rank, x = dist.get_rank(), samples_of(64, 2, torch.float64, device)
    nets: list[Any] = [model_of(64, torch.float64, device) for _ in range(2)]
    alone, shared = nets[0], DistributedDataParallel(nets[1])
    shared.register_comm_hook(Weights(share=counts[rank] / SAMPLES), weighted_sum)
    first = sum(counts[:rank])
    for net, mine in ((alone, x), (shared, x[first : first + counts[rank]])):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(10):
            stepped(net, optimizer, mine)
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def timed(device: torch.device, step: Any) -> float:
    synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    step()
    synchronize(device)
    dist.barrier()
    return time.perf_counter() - began


def ratios(device: torch.device, counts: list[int], width: int, rows: int) -> dict[str, str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = samples_of(width, rows, torch.float32, device)
    nets = {name: DistributedDataParallel(model_of(width, torch.float32, device)) for name in ("stock", "uneven")}
    weigh(nets["uneven"]).share = counts[rank] / SAMPLES
    sizes = {"stock": SAMPLES // world, "uneven": counts[rank]}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=1e-3) for name, net in nets.items()}
    plain, own = model_of(width, torch.float32, device), list[float]()
    on_own = torch.optim.SGD(plain.parameters(), lr=1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in nets}
    for turn in range(ROUNDS + 2):
        for name, net in nets.items():
            took = timed(device, lambda n=net, w=name: stepped(n, optimizers[w], x[: sizes[w]]))
            seconds[name] += [took] if turn >= 2 else []
        synchronize(device)
        began = time.perf_counter()
        stepped(plain, on_own, x[: counts[rank]])
        synchronize(device)
        own += [time.perf_counter() - began] if turn >= 2 else []
    slowest = torch.tensor([statistics.median(own)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    gains = [a / b for a, b in zip(seconds["stock"], seconds["uneven"], strict=True)]
    over = [s / slowest.item() for s in seconds["uneven"]]
    return {
        "stock_over_uneven": f"{statistics.median(gains):.2f} ({min(gains):.2f} - {max(gains):.2f})",
        "uneven_over_its_slowest_rank_alone": f"{statistics.median(over):.2f} ({min(over):.2f} - {max(over):.2f})",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=256, help="of a sample")
    options = parser.parse_args()
    dist.init_process_group("het", timeout=timedelta(seconds=300))
    device, speeds = rank_device(), told_speeds(dist.get_world_size()) or []
    counts = split(SAMPLES, speeds)
    with at_speed(device, speeds[dist.get_rank()] / max(speeds) if device.type != "cpu" else 1.0):
        off = off_one_process(device, counts)
        assert off < 1e-10, off
        found = ratios(device, counts, options.width, options.rows)
    if dist.get_rank() == 0:
        print(json.dumps({"samples": counts, "off_one_process": off, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
