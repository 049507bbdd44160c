"""Many hosts at once: every item has exactly one outcome, whatever its work does."""

from __future__ import annotations

import threading
import time

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import fan_out
from tests.busy import busy


def test_values_and_errors_become_outcomes() -> None:
    def work(item: int, deadline: Deadline) -> int:
        if item == 1:
            raise ConfigError("no")
        if item == 2:
            raise ZeroDivisionError("oh")
        return item * 10

    outcomes = {o.item: o for o in fan_out(range(4), work, deadline_s=10)}
    assert [outcomes[0].value, outcomes[3].value] == [0, 30]
    assert isinstance(outcomes[1].error, ConfigError)
    assert outcomes[2].error is not None
    assert "ZeroDivisionError: oh" in outcomes[2].error.message


def test_one_that_never_returns_is_left_behind_at_its_deadline() -> None:
    forever = threading.Event()
    closed = threading.Event()

    def work(item: int, deadline: Deadline) -> str:
        deadline.phase = "waiting for nothing"
        deadline.on_expiry(closed.set)
        if item == 0:
            forever.wait(60)
        return "done"

    begin = time.monotonic()
    outcomes = {o.item: o for o in fan_out([0, 1], work, deadline_s=0.3)}
    forever.set()
    assert time.monotonic() - begin < 5 * busy()
    assert outcomes[1].value == "done"
    assert outcomes[0].error is not None
    assert "waiting for nothing" in outcomes[0].error.message
    assert closed.is_set()


def test_at_most_so_many_at_once_and_all_of_them() -> None:
    lock = threading.Lock()
    now = most = 0

    def work(item: int, deadline: Deadline) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1
        return item

    assert sorted(o.item for o in fan_out(range(40), work, deadline_s=30, at_once=8)) == list(range(40))
    assert 1 < most <= 8


def test_leaving_early_expires_the_rest() -> None:
    closed = threading.Event()

    def work(item: int, deadline: Deadline) -> int:
        if item:
            deadline.on_expiry(closed.set)
            closed.wait(30)
        return item

    outcomes = fan_out([0, 1], work, deadline_s=60)
    assert next(outcomes).item == 0
    outcomes.close()  # type: ignore[attr-defined]
    assert closed.wait(5)


def test_closers_run_once_even_when_registered_late() -> None:
    calls: list[int] = []
    deadline = Deadline(10)
    deadline.on_expiry(lambda: calls.append(1))
    deadline.expire()
    deadline.expire()
    deadline.on_expiry(lambda: calls.append(2))
    assert calls == [1, 2]
    assert deadline.passed


def test_a_closer_that_fails_does_not_stop_the_others() -> None:
    calls: list[int] = []

    def bad() -> None:
        raise OSError

    deadline = Deadline(10)
    deadline.on_expiry(lambda: calls.append(1))
    deadline.on_expiry(bad)
    deadline.expire()
    assert calls == [1]
    with pytest.raises(OSError):
        bad()
