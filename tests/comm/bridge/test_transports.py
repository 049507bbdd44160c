"""Whether peer copies are taken is the same on all ranks; a further transport is a row."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bench.measure import make_group
from hetctl.comm.bridge.transports import TransportSelector
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement
from hetctl.comm.contract.transports import TRANSPORTS, TransportRow, carriers
from tests.comm.spawn import on_islands

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


def over_a_toy(rank: int) -> list[float]:
    """Messages and sums of two islands over a transport that one row has made known."""
    TRANSPORTS["toy"] = TransportRow(
        "tests.comm.bridge.toy_transport:make", reached=1.0, latency_s=0.0, unknown_rate=1.0
    )
    kind: Any = "toy"
    group = make_group(kind)
    total = torch.arange(100_000, dtype=torch.float32) * (rank + 1)
    dist.all_reduce(total, group=group)
    assert torch.equal(total, torch.arange(100_000, dtype=torch.float32) * 6)
    if rank == 0:
        dist.send(torch.full((3,), 5.0), 2, group=group)
    elif rank == 2:
        dist.recv(total := torch.zeros(3), 0, group=group)
    return list(total[:3].tolist())


def test_a_toy_transport_carries_what_crosses_islands() -> None:
    assert "toy" not in TRANSPORTS
    assert carriers() == ["shm", "tcp", "rdma", "direct"]
    assert on_islands((2, 1), over_a_toy) == [[0.0, 6.0, 12.0], [0.0, 6.0, 12.0], [5.0, 5.0, 5.0]]
