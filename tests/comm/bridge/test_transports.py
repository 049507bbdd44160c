"""Whether peer copies are taken is the same on all ranks: it is about the bridges of the whole group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from hetctl.comm.bridge.transports import TransportSelector
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement

ISLANDS = (PlacedIsland("a", "nvidia", "nccl", (0,)), PlacedIsland("b", "amd", "rccl", (1, 2)))
DIRECT = (PlacedBridge(("a", "b"), "direct"),)


@pytest.mark.parametrize(
    ("hosts", "bridges", "local"),
    [
        (("one", "one", "one"), DIRECT, True),
        (("one", "one", "two"), DIRECT, False),  # ranks 0 and 1 share a host, and say the same as rank 2
        (("one", "two", "two"), DIRECT, False),
        (("one", "two", "three"), (PlacedBridge(("a", "b"), "tcp"),), True),  # nothing needs an engine
    ],
)
def test_all_ranks_say_the_same(hosts: tuple[str, ...], bridges: tuple[PlacedBridge, ...], local: bool) -> None:
    placement, unused = Placement(ISLANDS, bridges, hosts=hosts), Any
    for rank in range(3):
        ways = TransportSelector(rank, (0, 1, 2), placement, unused, timeout=timedelta(seconds=1), watch=unused)  # type: ignore[arg-type]
        assert ways._local is local
