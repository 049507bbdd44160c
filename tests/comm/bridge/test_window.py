"""Who has a slot when: the window gives each back once, in order, and never one that a lost rail may still touch."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetctl.comm.bridge import window
from hetctl.comm.bridge.bridge import LaneKey
from hetctl.comm.bridge.failover import Loss, route
from hetctl.comm.bridge.lane_end import LaneEnd, RingEnd
from hetctl.comm.operation.work import OperationDeadline

CPU = torch.device("cpu")


class Posted:
    """Gone, or come, as far as this end can tell."""

    def wait(self, timeout: timedelta) -> bool:
        return True


class Broken:
    """On a rail that has failed."""

    def wait(self, timeout: timedelta) -> bool:
        raise RuntimeError("connection reset")


class Rails:
    """A port of three rails for a window of a test; slots that came back are counted by their first byte."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def movable(self) -> bool:
        return True

    def route(self, position: tuple[int, int]) -> int:
        return route(position, 3, [])[0]

    def post(self, slot: torch.Tensor, length: int, position: tuple[int, int]) -> Any:
        return Posted()

    def give(self, slot: torch.Tensor, event: Any) -> None:
        self.given.append(int(slot[0]))


def test_a_sender_keeps_a_chunk_until_another_rail_proves_that_it_has_come() -> None:
    bridge: Any = None  # not asked while nothing fails
    port: Any = Rails()
    key = LaneKey(True, 1, 0, 0, torch.device("cpu"))
    lane = window.Window(bridge, key, port, length=5, renew=lambda: None)
    message: Any = SimpleNamespace(deadline=OperationDeadline(60))
    positions = [(operation, chunk) for operation in range(4) for chunk in range(6)]  # rails 012012 120120 201201 ..
    for number, position in enumerate(positions):
        slot = torch.full((1,), number, dtype=torch.uint8)
        lane.post(window.Chunk(message, 0, 1, position, False, slot))
        lane.retire(lane.finish())
        rails_taken = [port.route(p) for p in positions[: number + 1]]
        for freed in port.given:  # each was proved by a chunk a window later on another rail
            assert any(rail != rails_taken[freed] for rail in rails_taken[freed + 5 :]), (number, freed)
    assert port.given == list(range(len(port.given)))
    assert len(port.given) >= len(positions) - 5 - 2  # and not much more is kept than a window


class Several(Rails):
    """Three rails, the second of which fails; what was posted anew is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Loss] = []
        self.posted: list[tuple[int, int]] = []  # (slot, rail)
        self.cuts: list[int] = []

    def route(self, position: tuple[int, int]) -> int:
        return route(position, 3, self.losses)[0]

    def lose(self, loss: Loss) -> str:
        self.losses.append(loss)
        return f"rail {loss.rail}"

    def cut(self, rail: int) -> None:
        self.cuts.append(rail)

    def post(self, slot: torch.Tensor, length: int, position: tuple[int, int]) -> Any:
        self.posted.append((int(slot[0]), self.route(position)))
        return Broken() if self.route(position) == 1 else Posted()

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        return torch.full((1,), 100 + number, dtype=torch.uint8)


class Single(LaneEnd):
    def __init__(self) -> None:
        self.given: list[tuple[int, Any]] = []

    def post(self, slot: torch.Tensor, length: int, position: tuple[int, int]) -> Any:
        return Posted()

    def give(self, slot: torch.Tensor, event: Any) -> None:
        self.given.append((int(slot[0]), event))


def window_over(port: Any, *, sending: bool, length: int = 5) -> window.Window:
    bridge: Any = SimpleNamespace(error=None)
    return window.Window(bridge, LaneKey(sending, 1, 0, 0, CPU), port, length=length, renew=lambda: None)


def chunk(number: int) -> window.Chunk:
    message: Any = SimpleNamespace(deadline=OperationDeadline(60))
    return window.Chunk(message, 0, 1, (0, number), False, torch.full((1,), number, dtype=torch.uint8))


@pytest.mark.parametrize("sending", [True, False])
def test_a_single_way_gives_each_slot_back_at_once_with_the_event_that_read_it(sending: bool) -> None:
    port = Single()
    lane = window_over(port, sending=sending)
    for number in range(3):
        lane.post(chunk(number))
        lane.retire(lane.finish(), read=None if sending else f"event {number}")
    assert port.given == [(n, None if sending else f"event {n}") for n in range(3)]
    assert not lane.posted


def test_a_receiver_keeps_no_slot_though_it_remembers_the_chunk() -> None:
    port = Rails()
    lane = window_over(port, sending=False)
    for number in range(4):
        lane.post(chunk(number))
        lane.retire(lane.finish())
    assert port.given == [0, 1, 2, 3]
    assert lane.is_late((0, 3)) is False  # remembered, but a moment old
    assert [kept.position for kept in lane._kept] == [(0, n) for n in range(4)]


@pytest.mark.parametrize("sending", [True, False])
def test_a_lost_rails_chunk_goes_on_and_its_old_slot_is_never_given_back(sending: bool) -> None:
    port = Several()
    lane = window_over(port, sending=sending)
    for number in range(4):
        lane.post(chunk(number))
    lane.retire(lane.finish())
    threading.Timer(0.05, lane.lose, [Loss(1, (0, 1))]).start()  # as the watch does, while the lane waits
    for _ in range(3):
        lane.retire(lane.finish())
    assert port.cuts == [1]
    again = [(slot, rail) for slot, rail in port.posted[4:]]
    assert [slot for slot, _ in again] == [1 if sending else 101]  # a receiver has it come somewhere else
    assert again[0][1] != 1
    assert len(lane._abandoned) == 1
    assert 1 not in port.given if not sending else port.given == []


class Reading:
    """A device that has passed some events."""

    passed = 0

    def event(self, number: int) -> Any:
        return SimpleNamespace(query=lambda: number < self.passed, synchronize=lambda: self.reach(number + 1))

    def reach(self, number: int) -> None:
        self.passed = max(self.passed, number)


def test_slots_that_a_device_reads_are_freed_in_order_and_two_may_wait() -> None:
    device, freed, slot = Reading(), list[int](), torch.empty(0)

    class Receiving(RingEnd):
        def _free(self) -> None:
            freed.append(len(freed))

    end = Receiving(LaneKey(False, 1, 0, 0, CPU))
    end.give(slot, None)
    assert len(freed) == 1
    for number in range(3):
        end.give(slot, device.event(number))
    assert (len(freed), device.passed) == (2, 1)  # the third made the receiver wait for the first
    device.passed = 2
    end.give(slot, device.event(3))
    assert len(freed) == 3
    end.idle()
    assert (len(freed), device.passed) == (5, 4)
