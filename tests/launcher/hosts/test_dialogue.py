"""Talking with a program on a host: much is written as fast as it is taken, and waited for only while it is not."""

from __future__ import annotations

from typing import cast

from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.dialogue import Dialogue
from hetctl.launcher.hosts.shell import Session


class SlowReader:
    """A session that takes little at a time and, every third time, nothing."""

    ended = False

    def __init__(self) -> None:
        self.got = bytearray()
        self.waits: list[float] = []
        self.asked = 0

    def write(self, data: bytes) -> int:
        self.asked += 1
        taken = data[: 1000 * (self.asked % 3 > 0)]
        self.got += taken
        return len(taken)

    def read(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)


def test_a_write_waits_only_where_nothing_was_taken() -> None:
    session, data = SlowReader(), bytes(range(256)) * 400
    Dialogue(cast(Session, session)).write(data, deadline=Deadline(60))
    assert session.got == data
    assert sum(wait > 0 for wait in session.waits) == session.asked // 3
