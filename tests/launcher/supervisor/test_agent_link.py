"""An agent's line: how long it may be silent is counted from when somebody listens."""

from __future__ import annotations

import queue
import sys
import time
from typing import Any

import pytest

from hetctl.comm.contract.errors import Unreachable
from hetctl.comm.contract.events import Done, Gone
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import OutputPiece, Session
from hetctl.launcher.supervisor import agent_link
from hetctl.launcher.supervisor.agent_link import AgentGone, AgentLink

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
