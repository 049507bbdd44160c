"""Which transport a bridge takes: the planned one, another one aloud, and never another one than was forced."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.contract.cluster import TransportKind
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement, joined_natively
from hetctl.comm.group.native import Membership, make_native
from hetctl.comm.operation.recorder import METER
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


@pytest.mark.parametrize(
    ("ways", "joined"),
    [
        ({}, ["a", "b", "c"]),
        ({"ab": "native"}, ["ab", "c"]),
        ({"ac": "native"}, ["ac", "b"]),
        ({"ab": "native", "bc": "native"}, ["abc"]),  # nothing is planned between the other two
        ({"bc": "native", "ac": "tcp"}, ["a", "bc"]),
        ({"ab": "native", "bc": "native", "ac": "shm"}, ["ab", "c"]),  # somebody wants a bridge between these
        ({"ab": "tcp", "ac": "rdma"}, ["a", "b", "c"]),
    ],
)
def test_islands_are_one_where_a_native_library_joins_them(ways: dict[str, TransportKind], joined: list[str]) -> None:
    bridges = [PlacedBridge((pair[1], pair[0]), kind) for pair, kind in ways.items()]
    assert joined_natively("abc", bridges) == [tuple(j) for j in joined]


def test_a_group_names_joined_islands_together_and_bridges_where_a_third_one_keeps_them_apart() -> None:
    islands = tuple(PlacedIsland(name, "cpu", "gloo", (2 * n, 2 * n + 1)) for n, name in enumerate("abc"))
    ways = (PlacedBridge(("a", "b"), "native"), PlacedBridge(("c", "b"), "native"), PlacedBridge(("c", "a"), "shm"))
    placement = Placement(islands, ways)
    assert placement.islands_of((5, 3, 2)) == [(5, 3, 2)]
    assert placement.spans_islands((5, 3))
    assert not placement.spans_islands((2, 3))
    assert placement.islands_of((0, 2, 4, 5)) == [(0, 2), (4, 5)]
    assert placement.transport("b", "c") == "tcp"  # in that group


def test_joined_islands_are_not_taken_for_one_that_is_named_like_both() -> None:
    names = ("h100+h200", "h100", "h200")  # the first one holds both generations
    islands = tuple(PlacedIsland(name, "cpu", "gloo", (n,)) for n, name in enumerate(names))
    placement = Placement(islands, (PlacedBridge(("h100", "h200"), "native"),))
    assert placement.islands_of((0, 1, 2)) == [(0,), (1, 2)]


def test_a_network_that_would_override_the_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NET", "IB")
    with pytest.raises(ConfigError, match="but NCCL_NET=IB overrides that"):
        make_native("nccl", Membership(dist.HashStore(), 0, 2, timedelta(seconds=1), sockets=True))


def talked(rank: int) -> tuple[str, int]:
    """What runs the world, and the bytes this rank sent over bridges in its collectives and a message from 0 to 1."""
    world, before = dist.get_world_size(), METER.sent
    total = torch.full((50_000,), float(rank))
    dist.all_reduce(total)
    assert total.unique().tolist() == [sum(range(world))]
    parts = [torch.zeros(3) for _ in range(world)]
    dist.all_gather(parts, torch.full((3,), float(rank)))
    assert torch.stack(parts)[:, 0].tolist() == list(range(world))
    if rank == 0:
        dist.send(torch.ones(9), 1)
    elif rank == 1:
        dist.recv(got := torch.zeros(9), 0)
        assert got.sum() == 9
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return type(backend).__name__, METER.sent - before


def test_islands_joined_natively_take_no_bridge() -> None:
    way = PlacedBridge(("island0", "island1"), "native")
    assert on_islands((1, 2), talked, bridges=(way,)) == [("ProcessGroupGloo", 0)] * 3


def test_a_third_island_takes_its_bridge_to_two_that_are_joined() -> None:
    way = PlacedBridge(("island0", "island1"), "native")
    found = on_islands((1, 1, 2), talked, bridges=(way,))
    assert {kind for kind, _ in found} == {"HetGroup"}
    # as two islands of two exchange: half of the sum each, both ways
    assert [sent for _, sent in found] == [sent for _, sent in on_islands((2, 2), talked)]
