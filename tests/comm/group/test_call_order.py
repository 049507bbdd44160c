"""Ranks that call different things: named within seconds, with what each called, whichever library was waiting."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.group.call_order import KEPT, CallOrder, absence, disagreement
from hetctl.comm.group.group import SLOW_SECONDS
from hetctl.comm.operation.recorder import Recorder
from tests.busy import busy
from tests.comm.spawn import on_islands

NAMES = [f"rank {n}" for n in range(8)]


def told(*calls: tuple[str, int], first: int = 1) -> str:
    return json.dumps([(number, *call) for number, call in enumerate(calls, first)])


SUM, MORE, GATHER, BARRIER = ("all_reduce", 12), ("all_reduce", 16), ("all_gather", 8), ("barrier", 0)


@pytest.mark.parametrize(
    ("calls", "differs", "absent"),
    [
        ([told(SUM, BARRIER)] * 3, None, None),
        (
            [told(SUM, SUM)] * 3 + [told(SUM, GATHER)],
            "rank 3 called all_gather of 8 bytes where rank 0, rank 1, rank 2 called all_reduce of 12 bytes",
            None,
        ),
        ([told(SUM)] * 6 + [told(MORE)], f"{NAMES[6]} called all_reduce of 16 bytes where ", None),
        ([told(BARRIER), told(SUM)], "rank 1 called all_reduce of 12 bytes where rank 0 called barrier", None),
        ([told(GATHER), told(("all_gather", 12))], None, None),
        ([told(SUM, BARRIER)] * 2 + [told(SUM)], None, "rank 2 did not call the barrier"),
        ([told(SUM), told()], None, "rank 1 did not call the all_reduce of 12 bytes"),
        ([told(SUM, BARRIER, first=4), told(BARRIER, BARRIER, SUM, SUM, BARRIER)], None, None),
        ([told(), told()], None, None),
    ],
)
def test_the_first_difference_is_named(calls: list[str], differs: str | None, absent: str | None) -> None:
    said = disagreement(dict(enumerate(calls)), NAMES)
    assert (said is None) == (differs is None)
    assert (said or "").startswith(differs or "")
    assert differs is not None or absence(dict(enumerate(calls)), NAMES) == absent


def test_many_ranks_are_counted() -> None:
    calls = dict(enumerate([told(SUM)] * 7 + [told(BARRIER)]))
    expected = "rank 7 called barrier where rank 0, rank 1, rank 2, rank 3 and 3 more called all_reduce of 12 bytes"
    assert disagreement(calls, NAMES) == expected


def test_only_the_last_calls_are_kept() -> None:
    order, recorder = CallOrder(), Recorder()
    assert not order.waits(0)
    for number in range(1, KEPT + 3):
        entry = recorder.begin("barrier", group="0", peer=None, nbytes=0)
        order.add(number, entry)
        entry.end(None)
    assert [n for n, *_ in json.loads(order.told())] == list(range(3, KEPT + 3))
    assert not order.waits(-1)
    order.add(KEPT + 3, recorder.begin("barrier", group="0", peer=None, nbytes=0))
    assert order.waits(-1)


def differs(rank: int, odd: int, how: str) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=120))
    data = torch.ones(3)
    dist.all_reduce(data, group=group)
    began = time.monotonic()
    try:
        if rank != odd:
            dist.broadcast(data, 0, group=group)
            dist.all_reduce(data, group=group)
        elif how == "another":
            dist.barrier(group=group)
        elif how == "size":
            dist.broadcast(torch.ones(5), 0, group=group)
        time.sleep(30 if how == "absent" else 0)
        dist.barrier(group=group)
        return "no error", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - began


@pytest.mark.parametrize(("how", "odd"), [("another", 0), ("another", 1), ("another", 3), ("size", 1), ("size", 3)])
def test_every_rank_learns_within_seconds_who_called_what(how: str, odd: int) -> None:
    """Where more comes than is expected over a gloo pair, gloo ends the process before anybody can be asked."""
    outcomes = on_islands((2, 2) if how == "another" else (1, 1, 1, 1), differs, odd, how, broken=True)
    said = {"another": "barrier", "size": "broadcast of 20 bytes"}[how]
    for text, took in outcomes:
        assert f"rank {odd} on host{odd} called {said} where " in text, text
        assert "called broadcast of 12 bytes" in text, text
        assert took < (SLOW_SECONDS + 8) * busy()


def absent(rank: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=3))
    try:
        dist.all_reduce(torch.ones(3), group=group)
        if rank == 2:
            time.sleep(8)
        dist.all_reduce(torch.ones(3), group=group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_who_did_not_come_is_named() -> None:
    for text in on_islands((2, 2), absent, broken=True):
        assert "rank 2 on host2 did not call the all_reduce of 12 bytes" in text, text


def slow(rank: int) -> float:
    group = dist.new_group(timeout=timedelta(seconds=120))
    data = torch.ones(3)
    for _ in range(2):
        if rank == 1:
            time.sleep(SLOW_SECONDS + 4)
        dist.all_reduce(data, group=group)
    dist.barrier(group=group)
    return float(data[0])


def test_who_is_late_but_calls_the_same_ends_nobody() -> None:
    assert on_islands((1, 2), slow) == [9.0] * 3
