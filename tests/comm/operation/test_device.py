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
from hetctl.comm.contract.placement import PlacedBridge, current_placement
from hetctl.comm.group.backend import create_over
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
from tests.comm.spawn import on_islands


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
        settings = {s.name: s.value for s in rank_settings(launch.seats, seat, shape, files={}, more=own[seat.host])}
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
    with pytest.raises(ConfigError, match="'xccl'"):
        make_native("xccl", Membership(dist.HashStore(), 0, 2, timedelta(seconds=1)))
    with pytest.raises(ConfigError, match="library 'unknown'"):
        native_of(library="unknown")


def carried(rank: int) -> dict[str, int]:
    """Ranks 0 and 1 are an island of toys, rank 2 is another one: sums over all, a message across, one inside."""
    toy_device.register()
    islands = tuple(replace(i, vendor="toys", torch_backend="toyccl") for i in current_placement().islands)
    bridges = (PlacedBridge(("island0", "island1"), "shm"),)
    placement = replace(current_placement(), islands=islands, bridges=bridges)
    dist.Backend.register_backend(
        "hettoy", lambda options, _=None: create_over(options, placement), extended_api=True, devices=device_types()
    )
    group = dist.new_group(backend="hettoy", timeout=timedelta(seconds=60))
    device = rank_device()
    assert (device.type, accelerator(), has_streams(device), has_cuda_runtime(device)) == ("toy", "toy", True, False)
    assert module_of(device).current_device() == 0
    for count in (10, 300_000):  # on the flat path, and in shares
        total = (torch.arange(count, dtype=torch.float32) * (rank + 1)).to(device)
        dist.all_reduce(total, group=group)
        assert torch.equal(total.cpu(), torch.arange(count, dtype=torch.float32) * 6)
    gathered = [torch.zeros(5, device=device) for _ in range(3)]
    dist.all_gather(gathered, torch.full((5,), float(rank), device=device), group=group)
    assert [t.tolist()[0] for t in gathered] == [0.0, 1.0, 2.0]
    if rank == 0:
        dist.send(torch.full((1000,), 7.0, device=device), 2, group=group)
    elif rank == 2:
        dist.recv(got := torch.zeros(1000, device=device), 0, group=group)
        assert got.tolist() == [7.0] * 1000
    return dict(toy_device.USED)


def test_a_toy_carries_sums_and_messages_across_islands() -> None:
    variables = {"HETCTL_DEVICE_TYPE": "toy", "HETCTL_DEVICE_INDEX": "0"}
    used = on_islands((2, 1), carried, variables=variables)
    assert all(of_rank["streams"] > 1 and of_rank["set_device"] for of_rank in used)
    assert all(of_rank["allreduce"] for of_rank in used[:2])  # by the toy's own library, inside the island of two
