"""Messages at their edges: tags that are too large, and ends that nobody waits for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bridge import MOST_TAG
from tests.comm.spawn import on_islands


def tagged(rank: int) -> None:
    """Ranks 0 and 1 are one island, 2 is another."""
    peers = {0: (1, 2), 1: (0,), 2: (0,)}[rank]
    for tag in (MOST_TAG + 1, 2**31, -1):
        for peer in peers:
            with pytest.raises(ValueError, match=f"from 0 to {MOST_TAG}"):
                dist.send(torch.ones(2), peer, tag=tag)
            with pytest.raises(ValueError, match=f"from 0 to {MOST_TAG}"):
                dist.recv(torch.ones(2), peer, tag=tag)
        with pytest.raises(ValueError, match=f"from 0 to {MOST_TAG}"):
            dist.recv(torch.ones(2), tag=tag)
    for peer in peers:
        if rank == 0:
            dist.send(torch.ones(2), peer, tag=MOST_TAG)
        else:
            dist.recv(got := torch.zeros(2), peer, tag=MOST_TAG)
            assert got.tolist() == [1.0, 1.0]


def test_tags_that_no_transport_carries_are_refused_and_the_group_goes_on() -> None:
    on_islands((2, 1), tagged, seconds=20)
