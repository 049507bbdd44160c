"""An agent's line: how long it may be silent is counted from when somebody listens."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from hetctl.comm.contract.errors import Unreachable
from hetctl.comm.contract.events import Done, Gone
from hetctl.launcher.agent.orders import Beat, Prepare, Signal, Start, Stop
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import OutputPiece, Session
from hetctl.launcher.supervisor import agent_link
from hetctl.launcher.supervisor.agent_link import AgentGone, AgentLink
from tests.busy import busy

AGENT = 'import sys; sys.stdin.readline(); print(\'{"event": "done", "left": 0, "n": 1}\', flush=True)'


def test_what_a_launcher_does_before_it_listens_costs_the_agent_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "SILENT_S", 20.0)

    def reopen(deadline: Deadline) -> tuple[Session, bytes]:
        raise Unreachable("nobody asked for that")

    session = LocalShell().start([sys.executable, "-c", AGENT], deadline=Deadline(20))
    link = AgentLink("alpha", session, [], reopen=reopen, lease_s=20.0)
    link._heard -= 60.0  # its launcher read a plan and a checkpoint meanwhile
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link.watch(events)
    time.sleep(0.2)
    session.write(b"\n")
    told = [events.get(timeout=20).event, events.get(timeout=20).event]
    link.close(wait_s=5.0)
    assert told == [Done(0), Gone(True, "")]


class Answered:
    """A session whose agent has spoken, read by a launcher that was held up for a minute."""

    exit_code = None

    def __init__(self) -> None:
        self.link: AgentLink | None = None
        self.said = [b'{"event": "done", "left": 0, "n": 1}\n', b""]

    @property
    def ended(self) -> bool:
        if self.link is not None:
            self.link._heard -= 60.0
        return not self.said

    def read(self, timeout_s: float) -> OutputPiece | None:
        return OutputPiece("out", self.said.pop(0)) if self.said else None

    def write(self, data: bytes) -> int:
        return len(data)

    def finish(self) -> None:
        """It has said all."""

    abort = close = finish


def test_an_answer_that_waits_to_be_read_is_no_silence() -> None:
    def reopen(deadline: Deadline) -> tuple[Session, bytes]:
        raise AgentGone("nobody asked for that")

    session = Answered()
    link = session.link = AgentLink("alpha", session, [], reopen=reopen, lease_s=20.0)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link.watch(events)
    assert events.get(timeout=20).event == Done(0)
    link.close(wait_s=5.0)


class Line:
    """A session that keeps what is written; an agent answers beats on it if `answers`, and it ends when it is told."""

    exit_code = None

    def __init__(self, *, answers: bool) -> None:
        self.answers, self.ended, self.written = answers, False, b""
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    @property
    def orders(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written.splitlines()]

    def write(self, data: bytes) -> int:
        self.written += data
        if self.answers:
            took = max((o.get("order", 0) for o in self.orders), default=0)
            self._said.put(json.dumps({"event": "beat", "took": took}).encode() + b"\n")
        return len(data)

    def read(self, timeout_s: float) -> OutputPiece | None:
        try:
            return OutputPiece("out", self._said.get(timeout=min(timeout_s, 0.02)))
        except queue.Empty:
            return None

    def finish(self) -> None:
        self.ended = True

    abort = close = finish


def test_orders_that_went_with_a_lost_line_are_given_again_on_the_next_one() -> None:
    first, deaf, last = Line(answers=True), Line(answers=False), Line(answers=True)
    lines = [deaf, last]
    link = AgentLink("alpha", first, [], reopen=lambda deadline: (lines.pop(0), b""), lease_s=60.0)
    link.watch(queue.SimpleQueue())
    link.send(Prepare())
    link.send(Beat())
    await_that(lambda: not link._untaken)
    first.ended = True
    await_that(lambda: link._session is deaf)
    link.send(Start(1))
    link.send(Signal("SIGUSR1"))
    deaf.ended = True
    await_that(lambda: len(last.orders) == 2)
    link.send(Beat())
    link.send(Stop(1.0))
    link.close(wait_s=5.0)
    assert [(o["do"], o.get("order")) for o in last.orders] == [
        ("start", 2),
        ("signal", 3),
        ("beat", None),
        ("stop", 4),
    ]


def test_half_an_order_is_followed_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not get through within its time ends its line: behind half an order another one could not be read."""
    monkeypatch.setattr(agent_link, "SEND_S", 0.1)
    stuck, free = Line(answers=False), Line(answers=True)

    def little(data: bytes) -> int:
        taken = data[: 5 - len(stuck.written)]
        stuck.written += taken
        return len(taken)

    monkeypatch.setattr(stuck, "write", little)
    link = AgentLink("alpha", stuck, [], reopen=lambda deadline: (free, b""), lease_s=60.0)
    link.watch(queue.SimpleQueue())
    link.send(Prepare())
    link.send(Start(1))
    await_that(lambda: len(free.orders) == 2)
    link.close(wait_s=5.0)
    assert len(stuck.written) == 5
    assert [o["do"] for o in free.orders] == ["spec", "start"]


def await_that(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20 * busy()
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


class Broken(Answered):
    """A session whose reading fails in a way that nobody foresaw."""

    ended = False

    def read(self, timeout_s: float) -> OutputPiece | None:
        raise ValueError("no such session")


class Ended(Answered):
    """A session that is over as soon as its last words are read."""

    def __init__(self) -> None:
        super().__init__()
        del self.said[1:]

    @property
    def ended(self) -> bool:
        return not self.said


@pytest.mark.parametrize(
    ("session", "last"), [(Broken(), Gone(False, "ValueError: no such session")), (Ended(), Gone(True, ""))]
)
def test_the_supervisor_hears_of_every_end_and_of_the_last_words_before_it(session: Session, last: Gone) -> None:
    link = AgentLink("alpha", session, [])
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link.watch(events)
    told = [events.get(timeout=20).event]
    while not isinstance(told[-1], Gone):
        told.append(events.get(timeout=20).event)
    link.close(wait_s=5.0)
    assert told == [*([Done(0)] if last.finished else []), last]
