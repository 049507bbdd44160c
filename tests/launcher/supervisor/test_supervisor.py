"""Which of a run's events is named as its failure, whichever of them the supervisor hears first."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from hetctl.launcher.run_folder.failure import Failure, find_failure
from hetctl.launcher.supervisor.agents import Agents
from hetctl.launcher.supervisor.supervisor import HostSpec, Supervisor

HOSTS = ("alpha", "beta")
PEER_IS_GONE = "BridgeError: recv from rank 0 failed: Read error: Connection reset by peer"


class Script:
    """A link that is ready at once, says its lines when ranks start, and ends when it is told to."""

    finished = True

    def __init__(self, host: str, lines: list[dict[str, Any]]) -> None:
        self.host, self._lines, self._events = host, lines, queue.SimpleQueue[Any]()

    def watch(self, events: Any) -> None:
        self._events = events

    def send(self, message: dict[str, Any]) -> None:
        if message["do"] == "spec":
            self._say({"event": "ready", "probe_port": None, "store_port": 1})
        elif message["do"] == "start":
            for line in self._lines:
                self._say(line)
        elif message["do"] == "stop" and not any(line["event"] in ("lost", "gone") for line in self._lines):
            self._say({"event": "done", "left": 0})

    def _say(self, event: dict[str, Any]) -> None:
        self._events.put({"host": self.host, **event})

    def close(self, *, wait_s: float) -> None:
        return None


def failure(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Failure | None:
    """What is named when alpha (rank 0) says the second lines after beta (rank 1) has said the first ones."""
    links: Any = (Script("beta", first), Script("alpha", second))
    specs = [HostSpec(host, ({"rank": HOSTS.index(host)},), "127.0.0.1") for host in ("beta", "alpha")]
    outcome = Supervisor(Agents((), links), specs, lambda event: None).run()
    return find_failure(outcome.exits, HOSTS, outcome.errors)


def ends(rank: int, message: str) -> dict[str, Any]:
    error = {"message": {"message": message, "extraInfo": {"timestamp": time.time()}}}
    return {"event": "exit", "rank": rank, "code": 1, "at": time.time(), "asked": False, "error": error}


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ({"event": "lost", "left": 0}, "its agent was killed"),
        ({"event": "gone", "reason": "the connection was lost"}, "alpha stopped answering"),
    ],
)
def test_a_host_that_is_lost_is_named_though_its_peers_noticed_first(lost: dict[str, Any], reason: str) -> None:
    found = failure([ends(1, PEER_IS_GONE)], [lost])
    assert found is not None
    assert (found.rank, found.host) == (0, "alpha")
    assert found.reason.startswith(reason)
    assert found.victims == (1,)


def test_a_ranks_own_error_is_named_though_a_host_is_lost_after_it() -> None:
    found = failure([ends(1, "ValueError: planted")], [{"event": "lost", "left": 0}])
    assert found is not None
    assert (found.rank, found.reason) == (1, "ValueError: planted")


def test_what_a_rank_had_said_itself_is_named_though_its_host_is_lost_then() -> None:
    own = ends(0, "ValueError: planted")
    found = failure([ends(1, PEER_IS_GONE)], [{**own, "event": "failing"}, {"event": "lost", "left": 0}])
    assert found is not None
    assert (found.rank, found.reason, found.victims) == (0, "ValueError: planted", (1,))
