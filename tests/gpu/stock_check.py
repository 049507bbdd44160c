"""One rank of stock PyTorch programs across islands of GPUs, and of what data parallelism costs there.

hetctl run --emulate h200:2,mi325x:2 --bridge shm -- python tests/gpu/stock_check.py [--ddp]

DDP, FSDP2, HSDP, pipelining (1F1B, interleaved, zero-bubble), tensor parallelism and DCP end, in fp64, where one
process ends. `--ddp` then times steps of DDP with 3.2 GB of fp32 gradients over the native library, over `het`, and
with copies through pageable memory, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn

from hetctl.comm.group.backend import bridge_bytes
from tests.comm.group.test_stock_programs import PROGRAMS, alone, device

BLOCKS, WIDTH, ROWS, ROUNDS = 12, 4096, 2048, 7  # 805 million parameters: 3.2 GB of fp32 gradients


def stock_programs() -> None:
    """Every program, against one process. Raises AssertionError."""
    rank, world, want = dist.get_rank(), dist.get_world_size(), alone()
    paths: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(paths, 0)
    for program in PROGRAMS:
        program(rank, world, want, paths[0])
        dist.barrier()
        if rank == 0:
            print(f"{program.__name__}: equal to one process", flush=True)


class Naive:
    """A communication hook as people write it first: copy out, sum over gloo, copy back."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        host = bucket.buffer().cpu()
        dist.all_reduce(host, group=self.group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().copy_(host.div_(dist.get_world_size())))
        return done


def big_model() -> nn.Sequential:
    torch.manual_seed(0)
    wide = 2 * WIDTH
    blocks = (nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(BLOCKS))
    with device():
        return nn.Sequential(*blocks)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    optimizer.zero_grad()
    (net(x) - x).pow(2).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began


def data_parallel_costs() -> dict[str, Any]:
    """Median seconds of a step per variant, and its ratio to the native library's step of the same round."""
    ddp: Any = nn.parallel.DistributedDataParallel
    native = dist.new_group(backend="nccl")
    nets = {
        "native": ddp(big_model(), process_group=native),
        "het": ddp(big_model()),
        "naive": ddp(big_model()),
    }
    nets["naive"].register_comm_hook(None, _hook(Naive()))
    x = torch.randn(ROWS, WIDTH, device=device())
    runs = {name: torch.optim.SGD(net.parameters(), lr=1e-3) for name, net in nets.items()}
    seconds: dict[str, list[float]] = {name: [] for name in nets}
    for turn in range(ROUNDS + 2):
        for name, net in nets.items():
            if name == "naive" and turn > 4:
                continue
            took = step(net, runs[name], x)
            if turn >= 2:
                seconds[name].append(took)
    ratios = {n: [a / b for a, b in zip(s, seconds["native"], strict=False)] for n, s in seconds.items()}
    return {
        name: {
            "step_ms": round(statistics.median(s) * 1e3, 1),
            "over_native": f"{statistics.median(ratios[name]):.2f} ({min(ratios[name]):.2f} - {max(ratios[name]):.2f})",
        }
        for name, s in seconds.items()
    }


def _hook(naive: Naive) -> Any:
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return naive(state, bucket)

    # DDP looks at them, and takes no strings
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    if device().type == "cuda":
        torch.cuda.set_device(device())
    dist.init_process_group("het", timeout=timedelta(seconds=60))
    stock_programs()
    if options.ddp:
        found = data_parallel_costs()
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    if dist.get_rank() == 0:
        print(f"bridge bytes of rank 0: {bridge_bytes()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
