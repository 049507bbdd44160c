"""Transfers in turn over ports: in order, around a port that fails, and an error that names the last one."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from hetctl.comm.bridge import rdma_ports as module
from hetctl.comm.bridge.engines.base import EngineFailed, EnginePort, Memory, Region
from hetctl.comm.bridge.rdma_ports import LaneTransfers, connect

BASE = 1 << 20


class FakeEngine:
    """Transfers end when `finish` says so; a broken one fails those under way and those to come."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, int]] = []  # where to, bytes
        self.finished: set[int] = set()
        self.dropped: list[int] = []
        self.broken = self.unreachable = False

    def connect(self, descriptor: Any) -> str:
        if self.unreachable:
            raise EngineFailed("it does not reach the peer")
        return str(descriptor)

    def post(self, peer: Any, region: Region, offset: int, *, there: int, nbytes: int, write: bool) -> int:
        assert write
        if self.broken:
            raise EngineFailed("it does not start a transfer")
        self.posted.append((there, nbytes))
        return len(self.posted) - 1

    def poll(self, handle: int) -> bool:
        if self.broken:
            raise EngineFailed("a transfer failed")
        return handle in self.finished

    def drop(self, handle: int) -> None:
        self.dropped.append(handle)


class Case:
    def __init__(self, networks: str = "ab", theirs: str = "ab", unreachable: str = "") -> None:
        self.engines = [FakeEngine() for _ in networks]
        self.lost: dict[str, str] = {}
        self.rails = [EnginePort(f"port{n}", n, cast(Any, e)) for n, e in zip(networks, self.engines, strict=True)]
        for rail, engine in zip(self.rails, self.engines, strict=True):
            engine.unreachable = rail.network in unreachable
        regions = [Region(Memory(0, 1 << 20), {}) for _ in networks]
        ports = [{"network": name, "descriptor": {}} for name in theirs]
        found = connect(self.rails, regions, ports, self.lost.__setitem__)
        self.transfers = LaneTransfers(found, BASE, self.lost.__setitem__, write=True)


def test_slots_take_the_ports_in_turn_and_end_in_order() -> None:
    case = Case()
    for number in range(4):
        case.transfers.begin(number * 100, 10)
    one, other = case.engines
    assert one.posted == [(BASE, 10), (BASE + 200, 10)]
    assert other.posted == [(BASE + 100, 10), (BASE + 300, 10)]
    other.finished = {0, 1}
    assert case.transfers.ended() == 0  # the first slot has not gone
    assert case.transfers.port == "porta"
    one.finished = {0}
    assert case.transfers.ended() == 2
    assert len(case.transfers) == 2
    assert (one.dropped, other.dropped) == ([0], [0])


def test_what_a_failed_port_owes_goes_over_the_other_one() -> None:
    case = Case()
    for number in range(4):
        case.transfers.begin(number * 100, 10)
    one, other = case.engines
    one.broken = True
    assert case.transfers.ended() == 0
    other.finished = set(range(10))
    assert sum(case.transfers.ended() for _ in range(4)) == 4
    assert sorted(to for to, _ in other.posted) == [BASE, BASE + 100, BASE + 200, BASE + 300]
    assert case.lost == {"porta": "a transfer failed"}
    case.transfers.begin(400, 10)
    assert other.posted[-1] == (BASE + 400, 10)


def test_the_last_port_s_failure_is_the_lane_s_and_named() -> None:
    case = Case()
    case.transfers.begin(0, 10)
    for engine in case.engines:
        engine.broken = True
    with pytest.raises(EngineFailed, match="does not start a transfer"):
        case.transfers.ended()
    assert case.transfers.port == "portb"
    assert list(case.lost) == ["porta"]


def test_a_port_that_is_alone_in_its_network_or_does_not_connect_is_lost_aloud() -> None:
    assert Case(theirs="b").lost == {"porta": "the other end has no port in its network"}
    assert Case(unreachable="a").lost == {"porta": "it does not reach the peer"}
    with pytest.raises(EngineFailed, match="no port reaches the other end"):
        Case(unreachable="ab")
    with pytest.raises(EngineFailed, match="no port in its network"):
        Case(theirs="c")


def test_a_first_contact_that_fails_loses_its_port_only() -> None:
    case = Case()
    case.engines[0].broken = True
    case.engines[1].finished = {0}
    case.transfers.introduce(50, time.monotonic() + 10)
    assert case.engines[1].posted == [(BASE, 50)]
    assert list(case.lost) == ["porta"]


def test_a_first_contact_ends_where_nobody_wants_it_any_more() -> None:
    case, looks = Case(), list[int]()

    def check() -> None:
        looks.append(1)
        if len(looks) > 2:
            raise RuntimeError("the connection was closed")

    with pytest.raises(RuntimeError, match="was closed"):
        case.transfers.introduce(50, time.monotonic() + 10, check)
    assert len(looks) == 3


def test_a_transfer_that_never_ends_is_an_error_and_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.transfers.begin(0, 10)
    case.transfers.begin(100, 10)
    case.engines[1].finished = {0}
    assert case.transfers.ended() == 0
    monkeypatch.setattr(module, "STALL_SECONDS", -1.0)
    with pytest.raises(EngineFailed, match="did not end within"):
        case.transfers.ended()
    assert case.transfers.port == "porta"
    assert case.lost == {}
    assert len(case.engines[1].posted) == 1


def test_a_new_oldest_transfer_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    monkeypatch.setattr(module, "STALL_SECONDS", -1.0)
    case.transfers.begin(0, 10)
    assert case.transfers.ended() == 0  # its time begins here
    case.engines[0].finished = {0}
    case.transfers.begin(100, 10)
    assert case.transfers.ended() == 1
