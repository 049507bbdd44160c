"""Stock PyTorch programs over islands, unmodified: what they compute equals what one process computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hetctl.comm.group.backend import bridge_bytes
from tests.comm.spawn import on_islands

SHAPES = [(1, 1), (2, 2), (1, 2), (1, 1, 1)]
BLOCKS, WIDTH, SAMPLES, STEPS = 24, 12, 24, 2  # blocks share out among 2, 3, 4, 6 and 8 stages


def device() -> torch.device:
    """The host; a GPU where `hetctl run` gave this rank one."""
    if os.environ.get("HETCTL_DEVICE_TYPE") == "cuda":
        return torch.device("cuda", int(os.environ["HETCTL_DEVICE_INDEX"]))
    return torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    return nn.Sequential(*blocks).double().to(device())


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=made, dtype=torch.float64).to(device()) for _ in range(2))
    return x, y


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, y)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()


def alone() -> dict[str, torch.Tensor]:
    """The parameters that one process ends with."""
    net = model()
    train(net, *samples())
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def check(net: nn.Module, want: dict[str, torch.Tensor], *, prefix: str = "") -> None:
    for name, parameter in net.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole.detach(), want[name.removeprefix(prefix)], rtol=0, atol=1e-12)


def my_samples(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    each = SAMPLES // world
    return tuple(t[rank * each : (rank + 1) * each] for t in samples())  # type: ignore[return-value]


def data_parallel(rank: int, world: int, want: dict[str, torch.Tensor], folder: str) -> None:
    net = nn.parallel.DistributedDataParallel(model())
    train(net, *my_samples(rank, world))
    check(net, want, prefix="module.")


def sharded(rank: int, world: int, want: dict[str, torch.Tensor], folder: str) -> None:
    shapes = [(world,)] + ([(2, 2)] if world == 4 else [])
    for number, shape in enumerate(shapes):  # the second mesh shards inside islands and replicates across them
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        net = model()
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        train(net, *my_samples(rank, world))
        check(net, want)
        if number == 0:
            checkpointed(net, want, folder, mesh)


def checkpointed(net: nn.Module, want: dict[str, torch.Tensor], folder: str, mesh: Any) -> None:
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder)
    fresh = model()
    for block in fresh:
        fully_shard(block, mesh=mesh)
    fully_shard(fresh, mesh=mesh)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state["model"])
    check(fresh, want)


def pipelined(rank: int, world: int, want: dict[str, torch.Tensor], folder: str) -> None:
    for schedule, per_rank in ((Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2), (ScheduleInterleavedZeroBubble, 2)):
        found = pipeline_of(schedule, per_rank)
        assert found
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-12)


def pipeline_of(schedule: Any, per_rank: int) -> dict[str, torch.Tensor]:
    """This rank's parameters after training in a stock pipeline."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = samples()
    count = world * per_rank
    size, net = BLOCKS // count, model()
    parts = {i: nn.Sequential(*net[i * size : (i + 1) * size]) for i in range(rank, count, world)}
    stages = [PipelineStage(part, i, count, device()) for i, part in parts.items()]
    target: Any = stages[0] if per_rank == 1 else stages
    runner = schedule(target, n_microbatches=2 * world, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        runner.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == world - 1 else {}))
        optimizer.step()
    named = ((i, *n.split(".", 1), p) for i, part in parts.items() for n, p in part.named_parameters())
    return {f"{int(block) + i * size}.{rest}": p.detach() for i, block, rest, p in named}


def tensor_parallel(rank: int, world: int, want: dict[str, torch.Tensor], folder: str) -> None:
    if world != 4:
        return
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "tensor"))
    assert type(mesh["tensor"].get_group()) is dist.ProcessGroup  # inside an island: the native group itself
    net = model()
    plan: dict[str, Any] = {}
    for i in range(0, BLOCKS, 2):
        plan |= {f"{i}.0": ColwiseParallel(), f"{i + 1}.0": RowwiseParallel()}
    parallelize_module(net, mesh["tensor"], plan)
    half = rank // 2
    x, y = (t[half * SAMPLES // 2 : (half + 1) * SAMPLES // 2] for t in samples())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        for parameter in net.parameters():
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            dist.all_reduce(local, dist.ReduceOp.AVG, mesh["data"].get_group())
        optimizer.step()
    check(net, want)


PROGRAMS = (data_parallel, sharded, pipelined, tensor_parallel)


def everything(rank: int, folder: str) -> int:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    want, world = alone(), dist.get_world_size()
    for program in PROGRAMS:
        program(rank, world, want, folder)
        dist.barrier()
    return bridge_bytes()


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: "+".join(map(str, s)))
def test_stock_programs_compute_what_one_process_computes(sizes: tuple[int, ...], tmp_path: Path) -> None:
    sent = on_islands(sizes, everything, str(tmp_path / "checkpoint"))
    assert all(count > 0 for count in sent)  # nobody was left out of what crossed islands
