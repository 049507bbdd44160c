"""Agents hear that somebody is there from the moment they are entered."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import Unreachable
from hetctl.launcher.agent.orders import Beat, Order
from hetctl.launcher.supervisor import agents, heartbeat
from hetctl.launcher.supervisor.agents import TargetHost, start_agents


class Entered:
    """A link to an agent that counts its beats."""

    host, finished = "early", False

    def __init__(self) -> None:
        self.heard, self.closed = threading.Semaphore(0), False

    def send(self, order: Order) -> None:
        assert isinstance(order, Beat)
        assert not self.closed
        self.heard.release()

    def close(self, *, wait_s: float) -> None:
        self.closed = True


def test_hosts_that_were_entered_hear_beats_while_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    link = Entered()

    def start_one(target: TargetHost, *_: Any) -> tuple[Any, Any]:
        if target.name == "late":
            assert all(link.heard.acquire(timeout=20) for _ in range(5))
            raise Unreachable("it refuses")
        return None, link

    monkeypatch.setattr(agents, "_start_one", start_one)
    refused: dict[str, str] = {}
    opened: Mapping[str, Any] = {"access": Access(), "open": None, "data_address": ""}
    targets = [TargetHost(name, **opened) for name in ("early", "late")]
    asked: Any = None
    with pytest.raises(Unreachable, match="late: it refuses"):
        start_agents(targets, asked, on_refusal=lambda name, error: refused.update({name: error.message}))
    assert refused == {"late": "it refuses"}
    assert link.closed
