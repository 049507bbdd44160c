"""Which transport a bridge takes: the planned one, another one aloud, and never another one than was forced."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.cluster import TransportKind
from hetctl.comm.placement import PlacedBridge, PlacedIsland, Placement
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
