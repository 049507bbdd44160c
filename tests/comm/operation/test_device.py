"""A further device type is rows in tables and what torch knows of it: a toy one is planned for, started and carries."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import NATIVES, backend_words, device_types, native_of
from hetctl.comm.contract.placement import PlacedBridge
from hetctl.comm.contract.transports import TransportKind
from hetctl.comm.group.native import MAKERS, Membership, make_native
from hetctl.comm.operation.device import (
    accelerator,
    has_cuda_runtime,
    has_streams,
    module_of,
    named_device_types,
    rank_device,
)
from hetctl.launcher.supervisor.environment import HostShape, device_type, rank_settings
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe
from tests.comm import toy_device
from tests.comm.spawn import TOYS, on_islands


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's rows, for one test."""
    tables: list[tuple[dict[str, Any], str]] = [(NATIVES, "toys"), (MAKERS, "toyccl"), (CLASSES, "toy1")]
    for table, name in tables:
        monkeypatch.setitem(table, name, None)  # taken out again when the test ends
    toy_device.add_rows()


@pytest.mark.usefixtures("rows")
def test_a_toy_is_planned_for_and_its_ranks_get_their_device() -> None:
    cluster = describe_cluster(parse_spec("toy1:2,h200:2", CLASSES), CLASSES)
    plan = make_plan(cluster, load_recipe(None, [("model.name", "llama-1b")]))
    launch = Launch.of(cluster, plan)
    assert {i.vendor: i.torch_backend for i in launch.placement.islands} == {"toys": "toyccl", "nvidia": "nccl"}
    of_rank, own = {}, launch.settings()
    for seat in launch.seats:
        shape = HostShape(8, "cuda", "10.0.0.1", None, "")
        settings = {
            s.name: s.value
            for s in rank_settings(
                launch.seats, seat, shape, world_size=len(launch.seats), files={}, more=own[seat.host]
            )
        }
        of_rank[seat.rank] = settings["HETCTL_DEVICE_TYPE"], "TOY_VISIBLE_DEVICES" in settings
    by_vendor = {i.vendor: {of_rank[r] for r in i.ranks} for i in plan.islands}
    assert by_vendor == {"toys": {("toy", True)}, "nvidia": {("cuda", False)}}


@pytest.mark.usefixtures("rows")
def test_names_come_from_the_table() -> None:
    real = describe_cluster(parse_spec("toy1:2,h200:2", CLASSES), CLASSES)
    assert device_type(real, ["toys"]) == "toy"
    assert device_type(real, ["intel"]) == "xpu"
    assert device_type(replace(real, runs="gloo"), ["toys"]) == "cpu"
    assert device_types() == ["cpu", "cuda", "xpu", "musa", "toy"]
    assert named_device_types()[:3] == ["cpu", "cuda", "xpu"]
    assert "musa" not in named_device_types()  # torch_musa's name: a group for it cannot be registered without it
    assert backend_words("toy") == "cpu:gloo,toy:toyccl"
    assert backend_words("cpu") == "gloo"
    assert native_of(torch_backend="toyccl").device_type == "toy"


def test_a_library_that_nobody_makes_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'mccl'"):
        make_native("mccl", Membership(dist.HashStore(), 0, 2, timedelta(seconds=1)))
    with pytest.raises(ConfigError, match="has no xccl"):  # this torch is no build for Intel's GPUs
        make_native("xccl", Membership(dist.HashStore(), 0, 2, timedelta(seconds=1)))
    assert {row.torch_backend for row in NATIVES.values() if row.trains} == set(MAKERS)
    with pytest.raises(ConfigError, match="library 'unknown'"):
        native_of(library="unknown")


def carried(rank: int) -> dict[str, int]:
    """Ranks 0 and 1 are an island of toys, rank 2 is another one: sums over all, a message across, one inside."""
    device = rank_device()
    assert (device.type, accelerator(), has_streams(device), has_cuda_runtime(device)) == ("toy", "toy", True, False)
    assert module_of(device).current_device() == 0
    for count in (10, 300_000):  # on the flat path, and in shares
        total = (torch.arange(count, dtype=torch.float32) * (rank + 1)).to(device)
        dist.all_reduce(total)
        assert torch.equal(total.cpu(), torch.arange(count, dtype=torch.float32) * 6)
    gathered = [torch.zeros(5, device=device) for _ in range(3)]
    dist.all_gather(gathered, torch.full((5,), float(rank), device=device))
    assert [t.tolist()[0] for t in gathered] == [0.0, 1.0, 2.0]
    if rank == 0:
        dist.send(torch.full((1000,), 7.0, device=device), 2)
    elif rank == 2:
        dist.recv(got := torch.zeros(1000, device=device), 0)
        assert got.tolist() == [7.0] * 1000
    return dict(toy_device.USED)


def test_a_toy_carries_sums_and_messages_across_islands() -> None:
    bridges = (PlacedBridge(("island0", "island1"), "shm"),)
    used = on_islands((2, 1), carried, devices={0: TOYS, 1: TOYS}, bridges=bridges)
    assert all(of_rank["streams"] > 1 and of_rank["set_device"] for of_rank in used)
    assert all(of_rank["allreduce"] for of_rank in used[:2])  # by the toy's own library, inside the island of two


def carried_to_hosts(rank: int, hosts: tuple[int, ...]) -> None:
    """Toys beside an island of `hosts`, which compute on the host: device memory of one side meets the other's host."""
    device, world = rank_device(), dist.get_world_size()
    first = next(r for r in range(world) if (r in hosts) != (0 in hosts))  # of the other island
    for count in (10, 300_000, 6_000_000):
        on_host = torch.full((count,), float(rank))
        total = (torch.arange(count, dtype=torch.float32) * (rank + 1)).to(device)
        works = [dist.all_reduce(t, async_op=True) for t in (total, on_host)]  # one order for both
        dist.barrier()
        for work in works:
            work.wait()
        assert torch.equal(total.cpu(), torch.arange(count, dtype=torch.float32) * (world * (world + 1) // 2))
        assert torch.equal(on_host, torch.full((count,), float(sum(range(world)))))
        shared = torch.full((count,), 5.0 if rank == first else 0.0).to(device)
        dist.broadcast(shared, first)
        assert torch.equal(shared.cpu(), torch.full((count,), 5.0))
        part = torch.zeros(count, device=device)
        dist.reduce_scatter_tensor(part, torch.ones(count * world).to(device))
        assert torch.equal(part.cpu(), torch.full((count,), float(world)))
        parts = torch.empty(count * world, device=device)
        dist.all_gather_into_tensor(parts, torch.full((count,), float(rank)).to(device))
        assert parts.cpu().view(world, count)[:, -1].tolist() == [float(r) for r in range(world)]
        got = torch.empty(world, device=device)
        dist.all_to_all_single(got, torch.full((world,), float(rank)).to(device))
        assert got.tolist() == [float(r) for r in range(world)]
    told = [None] * world
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": r} for r in range(world)]
    for there in (device, torch.device("cpu")):  # a program sends what it has; who receives has it where it wants it
        if rank == 0:
            dist.send(torch.full((1000,), 7.0).to(there), first)
        elif rank == first:
            dist.recv(arrived := torch.zeros(1000).to(device), 0)
            assert arrived.tolist() == [7.0] * 1000
    with pytest.raises(TypeError, match="devices combine no bits"):  # on every rank, so that nobody waits
        dist.all_reduce(torch.ones(4, dtype=torch.int32).to(device), dist.ReduceOp.BAND)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("toys", [0, 1])
def test_a_toy_and_hosts_sum_and_send_to_each_other(transport: TransportKind, toys: int) -> None:
    bridges = (PlacedBridge(("island0", "island1"), transport),)
    on_islands((2, 1), carried_to_hosts, (0, 1) if toys else (2,), devices={toys: TOYS}, bridges=bridges)
