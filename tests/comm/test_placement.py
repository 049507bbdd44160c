"""Which transport a bridge takes: the planned one, another one aloud, and never another one than was forced."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.cluster import TransportKind
from hetctl.comm.errors import ConfigError
from hetctl.comm.placement import PlacedBridge, PlacedIsland, Placement
from hetctl.comm.plan import Bridge
from hetctl.launcher.environment import PlannedPlace, Seat, placement_of
from tests.comm.spawn import on_islands

ISLANDS = (PlacedIsland("a", "cpu", "gloo", (0,)), PlacedIsland("b", "cpu", "gloo", (1,)))


def placed(kind: TransportKind, *, forced: bool) -> Placement:
    return Placement(ISLANDS, (PlacedBridge(("b", "a"), kind, forced),))


@pytest.mark.parametrize("kind", ["rdma", "direct"])
def test_a_forced_transport_that_is_none_is_an_error(kind: TransportKind) -> None:
    with pytest.raises(ConfigError, match=f"a - b cannot be {kind}"):
        placed(kind, forced=True).carrier("a", "b")
    assert placed(kind, forced=False).carrier("a", "b") == "tcp"


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize("forced", [True, False])
def test_a_transport_that_there_is_is_taken(kind: TransportKind, forced: bool) -> None:
    assert placed(kind, forced=forced).carrier("a", "b") == kind
    assert Placement(ISLANDS).carrier("a", "b") == "tcp"


def test_a_job_with_a_forced_transport_that_is_none_does_not_start() -> None:
    places = [PlannedPlace("a", "nvidia", (0,)), PlannedPlace("b", "amd", (1,))]
    seats = [Seat(0, "h0", 0), Seat(1, "h1", 0)]
    with pytest.raises(ConfigError, match="cannot be rdma"):
        placement_of(places, [Bridge(("a", "b"), "rdma", (), "asked for", forced=True)], seats, runs="gloo")
    chosen = placement_of(places, [Bridge(("a", "b"), "rdma", (), "the best one")], seats, runs="gloo")
    assert chosen.carrier("a", "b") == "tcp"


def heard(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        group = dist.new_group()
    dist.all_reduce(total := torch.ones(1), group=group)
    assert total.item() == 2
    return [str(w.message) for w in said]


def test_a_fallback_is_said_aloud_once() -> None:
    bridge = PlacedBridge(("island0", "island1"), "rdma", forced=False)
    first, second = on_islands((1, 1), heard, bridges=(bridge,))
    assert any("takes tcp: the 'het' back end has no 'rdma' transport yet" in w for w in first)
    assert not any("takes tcp" in w for w in second)


def test_ranks_refuse_a_forced_transport_that_is_none() -> None:
    with pytest.raises(AssertionError, match="ConfigError: the bridge island0 - island1 cannot be direct"):
        on_islands((1, 1), heard, bridges=(PlacedBridge(("island0", "island1"), "direct"),))
