"""Messages at their edges: tags that are too large, and ends that nobody waits for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bridge.bridge import MOST_TAG
from hetctl.comm.contract import variables
from hetctl.comm.operation.recorder import RECORDER
from hetctl.doctor.runs import who_waited
from hetctl.launcher.agent.run_files import pending
from tests.comm.spawn import on_islands

SECONDS = 10.0


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


def until(true: Callable[[], bool]) -> bool:
    """Whether it became true in time, as a program finds out that polls."""
    end = time.monotonic() + SECONDS
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    return true()


def polled(rank: int) -> None:
    """Ranks 0 and 1 are one island, 2 is another; the first sends to both."""
    for strided in (False, True):
        if rank == 0:
            works = [dist.isend(torch.ones(5), peer) for peer in (1, 2)]
            assert all(until(w.is_completed) for w in works)
        else:
            target = torch.zeros(5, 2)[:, 0] if strided else torch.zeros(5)
            work = dist.irecv(target, 0)
            assert until(work.is_completed)
            assert target.tolist() == [1.0] * 5
            works = [work]
        for work in works:
            work.wait()
            work.wait()  # as often as a program likes
    if rank == 1:
        early = dist.irecv(target, 0)
        assert not early.is_completed()
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(5) * 2, 1)
    elif rank == 1:
        early.wait()  # somebody waits natively already
        assert target.tolist() == [2.0] * 5


def test_a_program_that_polls_sees_messages_end() -> None:
    on_islands((2, 1), polled, seconds=20)


def forgets(rank: int, folder: str) -> None:
    if rank == 0:
        kept = dist.isend(torch.ones(4), 1)
        dist.isend(torch.ones(4), 1).wait()
    elif rank == 1:
        dist.recv(torch.zeros(4), 0)
        dist.recv(torch.zeros(4), 0)
    dist.barrier()
    if rank == 0:
        states = [e["state"] for e in RECORDER.entries() if e["operation"] == "send"]
        assert states == ["posted", "done"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variables.FLIGHT, folder)
            path = RECORDER.dump(0, reason="a test")
        assert path is not None
        assert pending(folder, 0) == []
        assert who_waited({0: json.loads(Path(path).read_text())["operations"]}) == ()
        kept.wait()
        assert {e["state"] for e in RECORDER.entries()} == {"done"}


def test_a_send_that_nobody_waits_for_is_not_what_ranks_wait_for(tmp_path: Path) -> None:
    on_islands((2, 1), forgets, str(tmp_path), seconds=20)
