"""The bridge on real GPUs: correctness first, then a short table of rates. One script for 2 and 4 devices of one host.

`python tests/gpu/bridge_check.py` spawns one process per GPU, islands of half of them each, every part on its own and
within its time, and prints one JSON document at the end. With `--gpus 4` on two of them islands share the GPUs. Nothing
is installed, nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from hetctl.comm.bench import exact, measure
from hetctl.comm.contract import variables
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement
from tests.gpu.emulated import gpu_of

MIB = 2**20
PART_SECONDS = 120


# -- parts: each runs on every rank and returns plain data (rank 0's is shown)


def messages_are_right(rank: int, world: int) -> Any:
    """Tensors between the first and the last GPU: sizes, dtypes, strides, tags, streams."""
    last, device = world - 1, gpu_of(rank)
    for count in (1, 1000, 3 * MIB + 1, 64 * MIB):
        want = torch.arange(count, device=device, dtype=torch.int32)
        if rank == 0:
            dist.send(want, last)
            dist.recv(got := torch.zeros_like(want), last)
            assert torch.equal(got, want + 1), count
        elif rank == last:
            dist.recv(got := torch.zeros_like(want), 0)
            assert torch.equal(got, want), count
            dist.send(got + 1, 0)
    for tag in (5, 3):  # columns, received in the other order
        column = torch.arange(1200.0, device=device).view(300, 4)[:, tag % 4]
        if rank == 0:
            dist.isend(column, last, tag=tag)
    if rank == last:
        for tag in (3, 5):
            target = torch.zeros(300, 2, device=device)[:, 1]
            dist.irecv(target, 0, tag=tag).wait()
            assert torch.equal(target, torch.arange(1200.0, device=device).view(300, 4)[:, tag % 4]), tag
    dist.barrier()
    return "right"


def large_tensors_are_right(rank: int, world: int) -> Any:
    """More than 2 GiB at once, where a 32-bit count would wrap: a message, a sum, a gather."""
    last, device, count = world - 1, gpu_of(rank), 2**31 + 4099
    data = torch.zeros(count, dtype=torch.uint8, device=device)
    if rank == 0:
        data[::4097], data[-1] = 7, 9
        dist.send(data, last)
    elif rank == last:
        dist.recv(data, 0)
        assert bool((data[:-1:4097] == 7).all())
        assert data[-1] == 9
        assert int(data.count_nonzero()) == -(-count // 4097) + 1
    del data
    total = torch.full((2**30 + 4099,), rank + 1.0, dtype=torch.bfloat16, device=device)
    dist.all_reduce(total)
    assert bool((total == world * (world + 1) // 2).all())
    del total
    gathered = torch.zeros(world * (2**30 + 5), dtype=torch.int16, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((2**30 + 5,), rank + 1, dtype=torch.int16, device=device))
    for index, part in enumerate(gathered.view(world, -1)):
        assert bool((part == index + 1).all()), index
    return "right"


def streams_are_kept(rank: int, world: int) -> Any:
    """A message leaves after the work before it, may be overwritten after wait, and is read after it has landed."""
    last, device = world - 1, gpu_of(rank)
    heavy = torch.randn(4096, 4096, device=device)
    for turn in range(20):
        data = torch.zeros(16 * MIB, device=device)
        if rank == 0:
            for _ in range(8):
                heavy = torch.tanh(heavy @ heavy)  # keeps the stream busy: the copy out must wait for the fill
            data.fill_(turn + 1)
            dist.isend(data, last).wait()
            data.fill_(-1)
        elif rank == last:
            work = dist.irecv(data, 0)
            work.wait()
            assert bool((data == turn + 1).all()), (turn, data[:4].tolist(), data[-4:].tolist())
        total = torch.full((8 * MIB + 3,), float(rank), device=device)
        for _ in range(4):
            heavy = torch.tanh(heavy @ heavy)
        total += turn
        dist.all_reduce(total, async_op=True).wait()
        want = sum(range(world)) + world * turn
        assert bool((total == want).all()), (turn, total[:4].tolist(), want)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        x = torch.full((5 * MIB,), 1.0, device=device)
        dist.all_reduce(x)
        assert bool((x == world).all())
    return "kept"


def sums_of_one_memory_keep_their_order(rank: int, world: int) -> Any:
    """A second sum begins when the first is over for the host, though the device, busy with products, still owes it."""
    device = gpu_of(rank)
    heavy = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    data = torch.zeros(64 * MIB, device=device)
    dist.all_reduce(data)  # kernels' first launches
    for turn in range(5):
        data.fill_(turn + 1)
        begun = torch.cuda.Event()
        begun.record()
        begun.synchronize()
        products = [heavy @ heavy for _ in range(30)]
        first = dist.all_reduce(data, async_op=True)  # behind the products, like everything on this stream
        while not first.is_completed():
            products[-1] = heavy @ heavy
            time.sleep(0.0005)
        second = dist.all_reduce(data, async_op=True)
        for _ in range(30):
            products[-1] = heavy @ heavy
        first.wait()
        second.wait()
        want = (turn + 1) * world**2
        assert bool((data == want).all()), (turn, want, data.unique()[:5].tolist())
    return "kept"


def collectives_are_right(rank: int, world: int) -> Any:
    """Every collective on device tensors, small and large, and on host tensors."""
    ranks = torch.arange(float(world))
    for device in (gpu_of(rank), torch.device("cpu")):
        for count in (7, 300_007, 10_000_019):
            if device.type == "cpu" and count > MIB:
                continue
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                x = torch.full((count,), rank + 1, dtype=dtype, device=device)
                dist.all_reduce(x)
                assert bool((x == world * (world + 1) // 2).all()), ("all_reduce", device, count, dtype)
            x = torch.full((count,), float(rank), device=device)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            assert bool((x == ranks.mean().item()).all()), ("avg", device, count)
            x = torch.full((count,), float(rank), device=device)
            dist.broadcast(x, world - 1)
            assert bool((x == world - 1).all()), ("broadcast", device, count)
            dist.reduce(x := torch.full((count,), float(rank), device=device), 0)
            assert rank or bool((x == ranks.sum().item()).all()), ("reduce", device, count)
            outs = [torch.empty(count, device=device) for _ in range(world)]
            dist.all_gather(outs, torch.full((count,), float(rank), device=device))
            assert all(bool((t == r).all()) for r, t in enumerate(outs)), ("all_gather", device, count)
            out = torch.empty(count, device=device)
            dist.reduce_scatter(out, [torch.full((count,), float(r), device=device) for r in range(world)])
            assert bool((out == rank * world).all()), ("reduce_scatter", device, count)
            dist.all_to_all(outs, [torch.full((count,), float(rank), device=device) for _ in range(world)])
            assert all(bool((t == r).all()) for r, t in enumerate(outs)), ("all_to_all", device, count)
            dist.gather(x := torch.full((count,), float(rank), device=device), outs if rank == 0 else None)
            assert rank or all(bool((t == r).all()) for r, t in enumerate(outs)), ("gather", device, count)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank})
    assert [f["rank"] for f in found] == list(range(world))
    dist.barrier()
    return "right"


def stock_programs_are_right(rank: int, world: int) -> Any:
    """DDP and a 1F1B pipeline in fp64 end where one process ends."""
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = gpu_of(rank)

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(world))).double().to(device)

    made = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8 * world, 256, generator=made, dtype=torch.float64).to(device) for _ in range(2))

    def train(net: nn.Module, step: Callable[[], None]) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            step()
            optimizer.step()

    alone = build()
    train(alone, lambda: nn.functional.mse_loss(alone(x), y).backward())
    ddp = nn.parallel.DistributedDataParallel(build(), device_ids=[device.index])
    mine = slice(rank * 8, rank * 8 + 8)
    train(ddp, lambda: nn.functional.mse_loss(ddp(x[mine]), y[mine]).backward())
    far = max((a - b).abs().max().item() for a, b in zip(ddp.parameters(), alone.parameters(), strict=True))
    part = build()[rank]
    schedule = Schedule1F1B(PipelineStage(part, rank, world, device), 2 * world, loss_fn=nn.functional.mse_loss)
    arguments = ((x,) if rank == 0 else (), {"target": y} if rank == world - 1 else {})
    train(part, lambda: schedule.step(*arguments[0], **arguments[1]))
    off = max((a - b).abs().max().item() for a, b in zip(part.parameters(), alone[rank].parameters(), strict=True))
    assert far < 1e-9, far
    assert off < 1e-9, off
    return {"ddp_difference": far, "pipeline_difference": off}


def bridge_figures(rank: int, world: int) -> Any:
    """Messages and all-reduces up to 1 GiB, latency and costs, as `hetctl bench bridge` measures them."""
    return measure.way(_ends(rank, world), 1024 * MIB)


def raw_ceilings(rank: int, world: int) -> Any:
    """What the parts can do by themselves: pinned copies, and eight gloo groups between host buffers."""
    return measure.raw_ceilings(_ends(rank, world))


def _ends(rank: int, world: int) -> exact.Ends:
    return exact.Ends(dist.group.WORLD, rank, world, gpu_of(rank))


# -- running them

PARTS: list[tuple[str, Callable[[int, int], Any], str, str]] = [  # name, part, back end, transport
    *(
        (f"{part.__name__} {way}", part, "het", way)
        for way in ("tcp", "shm")
        for part in (
            messages_are_right,
            large_tensors_are_right,
            collectives_are_right,
            streams_are_kept,
            sums_of_one_memory_keep_their_order,
            stock_programs_are_right,
            bridge_figures,
        )
    ),
    ("native_figures", bridge_figures, "cpu:gloo,cuda:nccl", ""),
    ("raw_ceilings", raw_ceilings, "cpu:gloo,cuda:nccl", ""),
]


def placement(world: int, transport: Any) -> Placement:
    """Two islands of half the GPUs each, on one host."""
    half = world // 2
    islands = (
        PlacedIsland("first", "nvidia", "nccl", tuple(range(half))),
        PlacedIsland("second", "nvidia", "nccl", tuple(range(half, world))),
    )
    hosts = ("this-host",) * world
    return Placement(islands, (PlacedBridge(("first", "second"), transport),), hosts=hosts)


def one_rank(rank: int, world: int, name: str, folder: str, answers: Any) -> None:
    part, backend = next((p, b) for n, p, b, _ in PARTS if n == name)
    try:
        torch.cuda.set_device(gpu_of(rank))
        if backend == "het":
            os.environ[variables.PLACEMENT] = str(Path(folder) / "placement.json")
            from hetctl.comm.group.autoload import register

            register()
        store = dist.FileStore(str(Path(folder) / "store"), world)
        limit = timedelta(seconds=PART_SECONDS / 3)
        dist.init_process_group(backend, rank=rank, world_size=world, store=store, timeout=limit)
        outcome = {"result": part(rank, world)}
        torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        outcome = {"error": f"rank {rank}: {type(error).__name__}: {error}"[:600]}
        traceback.print_exc()
    answers.put((rank, outcome))
    time.sleep(1.0)  # let the queue's thread write
    os._exit(0)


def run_part(name: str, world: int) -> dict[str, Any]:
    """The outcome of one part; processes that do not end in time are killed."""
    transport = next(t for n, _, _, t in PARTS if n == name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "placement.json").write_text(placement(world, transport or "tcp").to_json())
        context = mp.get_context("spawn")
        answers = context.Queue()
        ranks = [context.Process(target=one_rank, args=(r, world, name, folder, answers)) for r in range(world)]
        for process in ranks:
            process.start()
        outcomes: dict[int, Any] = {}
        end = time.monotonic() + PART_SECONDS
        while len(outcomes) < world and time.monotonic() < end:
            try:
                rank, outcome = answers.get(timeout=1)
                outcomes[rank] = outcome
            except queue.Empty:
                if all(not p.is_alive() for p in ranks):
                    break
            if any("error" in o for o in outcomes.values()):
                end = min(end, time.monotonic() + 10)
        for process in ranks:
            process.join(3)
            if process.is_alive():
                process.kill()
    errors = [o["error"] for o in outcomes.values() if "error" in o]
    missing = sorted(set(range(world)) - set(outcomes))
    if missing:
        errors.append(f"ranks {missing} did not end")
    return {"errors": errors} if errors else {"result": outcomes[0]["result"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--only", default="", help="run the parts whose name contains this")
    parser.add_argument("--limit", type=float, default=540, help="seconds for everything")
    options = parser.parse_args()
    began, report = time.monotonic(), {}
    for name, *_ in PARTS:
        if options.only not in name:
            continue
        if time.monotonic() - began > options.limit - 30:
            report[name] = {"errors": ["not run: the time was over"]}
            continue
        started = time.monotonic()
        try:
            report[name] = run_part(name, options.gpus)
        except Exception as error:
            report[name] = {"errors": [f"{type(error).__name__}: {error}"]}
        print(f"{name:36} {time.monotonic() - started:5.1f} s  {json.dumps(report[name])}", flush=True)
    print(json.dumps({"gpus": options.gpus, "torch": torch.__version__, "parts": report}, indent=1))
    return 1 if any("errors" in outcome for outcome in report.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
