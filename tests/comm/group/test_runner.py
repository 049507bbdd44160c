"""Which collectives may overtake others: those in parts may, where they touch other memory; nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from hetctl.comm.group.runner import PARTS_AHEAD, Part, PendingItem, QueuedCollective, Runner
from hetctl.comm.operation.work import BridgeError, HetWork, NativeFailed

SECONDS = 20


class Collective:
    """A collective in parts that notes when it began and ended, and ends when it is let."""

    def __init__(self, runner: Runner, *touched: torch.Tensor, parts: int = 1, parted: bool = True) -> None:
        self.begun, self.let, self.work = threading.Event(), threading.Event(), HetWork("a collective")
        self.handed = 0
        runner.put(self.work, lambda: self.call(parts), touched=touched, parted=parted)

    def call(self, parts: int) -> Iterator[Part]:
        self.begun.set()
        for _ in range(parts):
            self.handed += 1
            yield None, lambda: self.wait()

    def wait(self) -> None:
        assert self.let.wait(SECONDS)


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner("test", on_error=lambda reason: None)
    yield runner
    runner.close(seconds=SECONDS)


def test_a_later_one_begins_before_an_earlier_one_has_ended(runner: Runner) -> None:
    first, second = Collective(runner, torch.ones(4)), Collective(runner, torch.ones(4))
    assert second.begun.wait(SECONDS)
    assert not first.work.is_completed()
    second.let.set()
    first.let.set()
    second.work.wait()
    assert first.work.is_completed()


@pytest.mark.parametrize("how", ["the same memory", "whole"])
def test_common_memory_or_one_without_parts_waits(runner: Runner, how: str) -> None:
    data = torch.ones(4)
    first = Collective(runner, data[:3])
    other = data[2:] if how == "the same memory" else torch.ones(4)
    second = Collective(runner, other, parted=how != "whole")
    second.let.set()
    assert first.begun.wait(SECONDS)
    assert not second.begun.wait(0.2)
    first.let.set()
    second.work.wait()


class Event:
    """A device's event that is reached when it is told so."""

    reached = False

    def query(self) -> bool:
        return self.reached


def test_one_that_ends_in_the_first_thread_overtakes_nobody(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of its size on a device: its second half would come before an earlier one's on some ranks only."""
    first = Collective(runner, torch.ones(4))
    assert first.begun.wait(SECONDS)
    monkeypatch.setattr(runner, "_is_warm", lambda job: False)
    second = Collective(runner, torch.ones(8))
    second.let.set()
    assert not second.begun.wait(0.2)
    first.let.set()
    second.work.wait()
    assert first.work.is_completed()


def test_what_the_device_still_owes_is_waited_for_where_memory_is_common(runner: Runner) -> None:
    def extents(data: torch.Tensor) -> list[tuple[int, int]]:
        return QueuedCollective(HetWork("a collective"), lambda: None, [data], parted=True).extents

    data, event, pending_device_work = torch.ones(4), Event(), runner.pending_device_work
    pending_device_work.add(PendingItem("a collective", None, event, data.device, extents(data[:3])))
    assert pending_device_work.on(extents(torch.ones(4))) == []
    assert pending_device_work.on(extents(data[3:])) == []
    assert pending_device_work.on(extents(data[2:])) == [event]
    event.reached = True
    assert pending_device_work.on(extents(data)) == []
    assert not pending_device_work._open


def test_parts_on_their_way_are_bounded(runner: Runner) -> None:
    many = Collective(runner, torch.ones(1), parts=3 * PARTS_AHEAD)
    behind = Collective(runner, torch.ones(1))
    assert not behind.begun.wait(0.2)
    assert many.handed <= PARTS_AHEAD + 1
    many.let.set()
    behind.let.set()
    behind.work.wait()
    assert many.handed == 3 * PARTS_AHEAD


def test_beginnings_of_second_halves_come_before_the_ends_of_earlier_ones(runner: Runner) -> None:
    """With three islands the second exchange of one part begins while the first of them is still on its way."""
    told: list[str] = []
    gate = threading.Event()

    def step(name: str) -> Callable[[], None]:
        return lambda: told.append(name)

    def call() -> Iterator[Part]:
        yield lambda: assert_set(gate), step("end 0")
        yield step("begin 1"), step("end 1")
        yield step("begin 2"), step("end 2")
        gate.set()

    work = HetWork("a collective")
    runner.put(work, call, touched=[torch.ones(1)], parted=True)
    work.wait()
    assert told == ["begin 1", "end 0", "begin 2", "end 1", "end 2"]


def assert_set(event: threading.Event) -> None:
    assert event.wait(SECONDS)


def test_an_error_in_a_part_ends_its_collective_and_a_native_one_waits_for_the_verdict() -> None:
    told: list[str] = []
    runner = Runner("test", on_error=told.append)

    def fails(error: Exception) -> Iterator[Part]:
        def end() -> None:
            raise error

        yield None, end

    wrong = HetWork("wrong")
    runner.put(wrong, lambda: fails(ValueError("shapes")), touched=[torch.ones(1)], parted=True)
    with pytest.raises(ValueError, match="shapes"):
        wrong.wait()
    broken, stuck = HetWork("broken"), Collective(runner, torch.ones(1), parts=2 * PARTS_AHEAD)
    assert stuck.begun.wait(SECONDS)
    runner.put(broken, lambda: fails(NativeFailed("the peer is gone")), touched=[torch.ones(1)], parted=True)
    stuck.let.set()
    stuck.work.wait()
    while not told:
        broken.is_completed()
    assert told == ["the peer is gone"]
    assert not broken.is_completed()
    runner.fail(BridgeError("the verdict"))
    with pytest.raises(BridgeError, match="the verdict"):
        broken.wait()
    with pytest.raises(BridgeError, match="the verdict"):
        runner.put(HetWork("late"), lambda: None, touched=[torch.ones(1)])
    runner.close(seconds=SECONDS)


def test_what_is_on_its_way_when_the_runner_closes_ends() -> None:
    runner = Runner("test", on_error=lambda reason: None)
    pending = Collective(runner, torch.ones(4), parts=3)
    assert pending.begun.wait(SECONDS)
    closing = threading.Thread(target=lambda: runner.close(seconds=SECONDS))
    closing.start()
    pending.let.set()
    closing.join(SECONDS)
    assert pending.work.is_completed()
