"""The agent's line: events are kept until confirmed, said again to who comes back, and never block."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetctl.launcher.agent.supervisor_connection import SupervisorConnection


class Line:
    """A wire, and the far ends of its stdin and stdout."""

    def __init__(self) -> None:
        stdin, self.to_agent = os.pipe()
        self.from_agent, stdout = os.pipe()
        self.wire = SupervisorConnection(selectors.DefaultSelector(), stdin, stdout)
        self.ours = (stdin, stdout)

    def heard(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.read(self.from_agent, 1 << 20).splitlines()]

    def order(self, **command: Any) -> list[dict[str, Any]]:
        os.write(self.to_agent, json.dumps(command).encode() + b"\n")
        return self.wire.commands()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.wire.close()
    for fd in (made.to_agent, made.from_agent, *made.ours):
        os.close(fd)


def test_what_was_said_counts_as_heard_once_it_is_confirmed(line: Line) -> None:
    first = line.wire.tell(event="hello")
    last = line.wire.tell(event="done", left=0)
    assert [e["n"] for e in line.heard()] == [first, last]
    line.order(do="beat", got=first)
    assert (line.wire.confirmed(first), line.wire.confirmed(last)) == (True, False)
    line.wire.tell(event="beat")  # later words do not matter
    line.order(do="part", got=last)
    assert line.wire.confirmed(last)


def test_who_comes_back_hears_what_it_missed(line: Line, tmp_path: Path) -> None:
    line.wire.listen(str(tmp_path / "agent.sock"))
    heard, missed = line.wire.tell(event="exit", rank=0), line.wire.tell(event="exit", rank=1)
    line.order(do="beat", got=heard)
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(line.wire.path)
        line.wire.accept()
        told = [json.loads(text) for text in visitor.recv(1 << 16).splitlines()]
    assert told == [{"event": "attached"}, {"event": "exit", "rank": 1, "n": missed}]


def test_a_line_that_nobody_reads_does_not_block(line: Line) -> None:
    for _ in range(100):
        line.wire.tell(event="log", text="x" * 10_000)
    assert line.wire.connected
