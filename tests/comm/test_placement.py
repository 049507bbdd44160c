"""Which transport a bridge takes: the planned one, another one aloud, and never another one than was forced."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.cluster import TransportKind
from hetctl.comm.emulate import Machine, label_machine, parse_spec
from hetctl.comm.errors import ConfigError
from hetctl.comm.natives import NativeName
from hetctl.comm.placement import PlacedBridge, PlacedIsland, Placement
from hetctl.trainer.planning.assemble import choose_transport
from hetctl.trainer.planning.hardware import CLASSES
from tests.comm.spawn import on_islands

ISLANDS = (PlacedIsland("a", "cpu", "gloo", (0,)), PlacedIsland("b", "cpu", "gloo", (1,)))


def placed(kind: TransportKind, *, forced: bool) -> Placement:
    return Placement(ISLANDS, (PlacedBridge(("b", "a"), kind, forced),))


@pytest.mark.parametrize("kind", ["tcp", "shm", "rdma", "direct"])
def test_a_pair_gets_the_planned_transport_and_tcp_where_none_is_planned(kind: TransportKind) -> None:
    assert placed(kind, forced=True).transport("a", "b") == kind
    assert placed(kind, forced=True).is_forced("a", "b")
    assert not placed(kind, forced=False).is_forced("a", "b")
    assert Placement(ISLANDS).transport("a", "b") == "tcp"


def heard(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        group = dist.new_group()
        dist.all_reduce(total := torch.ones(1), group=group)
    assert total.item() == 2
    return [str(w.message) for w in said]


def test_a_fallback_is_said_aloud_once_and_says_why() -> None:
    bridge = PlacedBridge(("island0", "island1"), "rdma", forced=False)
    first, second = on_islands((1, 1), heard, bridges=(bridge,))
    (sentence,) = first
    assert sentence.startswith("the bridge island0 - island1 takes tcp, not rdma: rdma with nixl: host")
    assert "HETCTL_RDMA is not set" in sentence
    assert second == []


@pytest.mark.parametrize("kind", ["rdma", "direct"])
def test_ranks_refuse_a_forced_transport_that_is_none(kind: TransportKind) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError: the bridge island0 - island1 cannot be {kind}: .* not set"):
        on_islands((1, 1), heard, bridges=(PlacedBridge(("island0", "island1"), kind),))


@pytest.mark.parametrize(("native", "asked", "kind"), [("nccl", "auto", "shm"), ("nccl", "direct", "direct")])
def test_a_machines_own_devices_copy_to_each_other_only_where_that_is_asked_for(
    native: NativeName, asked: str, kind: str
) -> None:
    spec = parse_spec("h200:1,mi325x:1", CLASSES)
    cluster = label_machine(spec, Machine("here", native, (1 << 30,) * 2))
    names = [island.name for island in cluster.islands]
    chosen = choose_transport(cluster.link(*names), *names, forced=asked)
    assert chosen.kind == kind
    assert kind == "shm" or "no RDMA" in chosen.reason


def test_processes_have_no_device_memory_to_copy() -> None:
    cluster = label_machine(parse_spec("cpu:1,cpu:1", CLASSES), Machine("here", "gloo", (1 << 30,) * 2))
    names = [island.name for island in cluster.islands]
    with pytest.raises(ConfigError, match="no device here"):
        choose_transport(cluster.link(*names), *names, forced="direct")
