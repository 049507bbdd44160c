"""Runs a function on every rank of an emulated cluster of CPU islands, each rank its own process."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hetctl.comm.contract import variables as environment
from hetctl.comm.contract.natives import native_of
from hetctl.comm.contract.placement import PlacedIsland, Placement, current_placement
from hetctl.comm.operation.device import module_of_type
from tests.busy import busy
from tests.comm import toy_device

# torch._dynamo: the first update of an optimiser imports it, which takes each rank nearly two seconds
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "hetctl.comm.group.backend", "hetctl.trainer.loop.loop"]


Native = tuple[str, str]  # an island's vendor, and the torch back end of its device type
NONE: Mapping[int, Native] = {}
TOYS: Native = ("toys", "toyccl")
ENDED = "FAILED: ended without an outcome"


def placement_of(
    sizes: tuple[int, ...], torch_backend: str = "gloo", devices: Mapping[int, Native] = NONE, **more: Any
) -> Placement:
    """Islands of these sizes over consecutive ranks on one back end, but for those whose `devices` are named."""
    islands, first = [], 0
    for index, size in enumerate(sizes):
        native = devices.get(index, ("cpu", torch_backend))
        islands.append(PlacedIsland(f"island{index}", *native, tuple(range(first, first + size))))
        first += size
    return Placement(tuple(islands), hosts=tuple(f"host{r}" for r in range(first)), **more)


def server() -> Any:
    """What forks clean processes that have torch already: ten times as quick as new ones."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def on_islands(
    sizes: tuple[int, ...],
    body: Callable[..., Any],
    *args: Any,
    seconds: float = 60,
    timeout: float | None = None,
    lost: tuple[int, ...] = (),
    broken: bool = False,
    variables: Mapping[str, str] | None = None,
    **placed: Any,
) -> list[Any]:
    """What `body(rank, *args)` returned on each rank, inside an initialised `het` world; raises the first failure.

    The ranks in `lost` are expected never to return; they are killed when the others have. `variables` are set in the
    environment of all ranks. All of it, and any operation, may take `seconds`, or longer where the machine is busy;
    tests about timeouts name the operations' `timeout`.
    """
    seconds *= busy()
    allowed = seconds if timeout is None else timeout
    with tempfile.TemporaryDirectory() as folder:
        placement = placement_of(sizes, **placed)
        (Path(folder) / "placement.json").write_text(placement.to_json())
        world = sum(sizes)
        processes = [
            server().Process(
                target=_rank,
                args=(rank, world, folder, body, args, allowed, broken or bool(lost), variables or {}),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        stuck = _join(processes, Path(folder), seconds=seconds + 20, lost=lost)
        outcomes = [_outcome(Path(folder) / f"{rank}.pt") for rank in range(world)]
    failed = {r: o for r, o in enumerate(outcomes) if isinstance(o, str) and o.startswith("FAILED") and r not in lost}
    for rank in sorted(failed, key=lambda r: failed[r] == ENDED):  # others may have been killed for the first one
        raise AssertionError(f"rank {rank}: {failed[rank]}")
    assert not stuck, f"ranks {stuck} did not end"
    return outcomes


def _join(processes: list[Any], folder: Path, *, seconds: float, lost: tuple[int, ...]) -> list[int]:
    """Wait for all ranks, a short while once one has failed; kill the rest and return who they were."""
    end = time.monotonic() + seconds
    running = {p.sentinel: r for r, p in enumerate(processes) if r not in lost}
    while running and (left := end - time.monotonic()) > 0:
        for sentinel in wait(list(running), left):
            rank = running.pop(sentinel)  # type: ignore[index]
            outcome = _outcome(folder / f"{rank}.pt")
            if isinstance(outcome, str) and outcome.startswith("FAILED"):
                end = min(end, time.monotonic() + 3)
    for rank in [*running.values(), *lost]:
        processes[rank].kill()
        processes[rank].join()
    return list(running.values())


def _outcome(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else ENDED


def _rank(
    rank: int,
    world: int,
    folder: str,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    seconds: float,
    broken: bool,
    more: Mapping[str, str],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(more)
    os.environ[environment.PLACEMENT] = str(Path(folder) / "placement.json")
    from hetctl.comm.group.autoload import register

    mine = current_placement().island_of_rank[rank]
    if any(island.vendor == TOYS[0] for island in current_placement().islands):
        toy_device.register()
    if mine.vendor != "cpu":
        kind = native_of(torch_backend=mine.torch_backend).device_type
        os.environ[environment.DEVICE_TYPE] = kind
        os.environ[environment.DEVICE_INDEX] = str(rank % module_of_type(kind).device_count())
    register()
    store = dist.FileStore(str(Path(folder) / "store"), world)
    try:
        dist.init_process_group("het", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=seconds))
        outcome = body(rank, *args)
        if not broken:
            dist.barrier()
        dist.destroy_process_group()
    except Exception:
        outcome = "FAILED\n" + traceback.format_exc()
    torch.save(outcome, Path(folder) / f"{rank}.pt")
