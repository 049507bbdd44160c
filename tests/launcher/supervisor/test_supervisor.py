"""Which of a run's events is named as its failure, whichever of them the supervisor hears first."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.events import Done, Event, Exited, Failing, Gone, Lost, Ready, StoreLost, Told
from hetctl.launcher.agent.orders import Beat, Order, Prepare, Start, Stop, WorkerOrder
from hetctl.launcher.run_folder.failure import Failure, find_failure
from hetctl.launcher.supervisor import heartbeat
from hetctl.launcher.supervisor.agents import Agents
from hetctl.launcher.supervisor.heartbeat import Heartbeat
from hetctl.launcher.supervisor.supervisor import Supervisor

Line = tuple[Event, int | None]  # an event and the rank that it is of
HOSTS = ("alpha", "beta")
PEER_IS_GONE = "BridgeError: recv from rank 0 failed: Read error: Connection reset by peer"


class Script:
    """A link that is ready at once, says its lines when ranks start, and ends when it is told to."""

    finished = False

    def __init__(self, host: str, lines: list[Line]) -> None:
        self.host, self._lines, self._events = host, lines, queue.SimpleQueue[Any]()
        self.beats = 0

    def watch(self, events: Any) -> None:
        self._events = events

    def send(self, order: Order) -> None:
        self.beats += isinstance(order, Beat)
        if isinstance(order, Prepare):
            self._say((Ready(1, store_port=1, probe_port=None), None))
        elif isinstance(order, Start):
            for line in self._lines:
                self._say(line)
        elif isinstance(order, Stop) and not any(isinstance(event, (Lost, Gone)) for event, _ in self._lines):
            self._say((Done(0), None))

    def _say(self, line: Line) -> None:
        self._events.put(Told(line[0], self.host, line[1]))

    def close(self, *, wait_s: float) -> None:
        return None

    def complaint(self) -> str:
        return "KeyError: 'planted'"


def agents_of(links: Any) -> Agents:
    agents = Agents((), links, Heartbeat())
    for link in links:
        agents.heartbeat.add(link)
    return agents


def failure(first: list[Line], second: list[Line]) -> Failure | None:
    """What is named when alpha (rank 0) says the second lines after beta (rank 1) has said the first ones."""
    links: Any = (Script("beta", first), Script("alpha", second))
    specs = {host: Prepare((WorkerOrder(HOSTS.index(host)),)) for host in ("beta", "alpha")}
    outcome = Supervisor(agents_of(links), specs, lambda event: None).run()
    return find_failure(outcome.exits, HOSTS, outcome.errors)


def written(message: str) -> dict[str, Any]:
    return {"message": {"message": message, "extraInfo": {"timestamp": time.time()}}}


def ends(rank: int, message: str) -> Line:
    return Exited(1, time.time(), asked=False, error=written(message)), rank


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (Lost(0), "its agent was killed"),
        (Lost(0, failed=True), "its agent failed (KeyError: 'planted'), and its ranks with it"),
        (Gone(finished=False, reason="the connection was lost"), "alpha stopped answering"),
    ],
)
def test_a_host_that_is_lost_is_named_though_its_peers_noticed_first(lost: Event, reason: str) -> None:
    found = failure([ends(1, PEER_IS_GONE)], [(lost, None)])
    assert found is not None
    assert (found.rank, found.host) == (0, "alpha")
    assert found.reason.startswith(reason)
    assert found.victims == (1,)


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (Lost(0), "its agent was killed"),
        (Lost(0, failed=True), "its agent failed (KeyError: 'planted')"),
        (Gone(finished=False, reason="no room"), "no room"),
    ],
)
def test_a_host_that_is_lost_before_it_is_ready_says_why(lost: Event, why: str) -> None:
    class Early(Script):
        def send(self, order: Order) -> None:
            if isinstance(order, Prepare):
                self._say((lost, None))

    supervisor = Supervisor(agents_of((Early("alpha", []),)), {"alpha": Prepare((WorkerOrder(0),))}, lambda event: None)
    with pytest.raises(WorkFailed) as failed:
        supervisor.run()
    assert failed.value.message == f"alpha cannot start its ranks: {why}"


def test_a_store_that_is_lost_is_named_though_its_ranks_noticed_first() -> None:
    found = failure([ends(1, PEER_IS_GONE)], [ends(0, PEER_IS_GONE), (StoreLost("was ended by SIGKILL"), None)])
    assert found is not None
    assert (found.host, found.reason) == ("alpha", "the run's store on alpha was ended by SIGKILL")


def test_a_ranks_own_error_is_named_though_a_host_is_lost_after_it() -> None:
    found = failure([ends(1, "ValueError: planted")], [(Lost(0), None)])
    assert found is not None
    assert (found.rank, found.reason) == (1, "ValueError: planted")


def test_what_a_rank_had_said_itself_is_named_though_its_host_is_lost_then() -> None:
    own = Failing(time.time(), written("ValueError: planted")), 0
    found = failure([ends(1, PEER_IS_GONE)], [own, (Lost(0), None)])
    assert found is not None
    assert (found.rank, found.reason, found.victims) == (0, "ValueError: planted", (1,))


def test_agents_hear_that_somebody_is_there_while_a_disk_holds_up_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    link = Script("alpha", [(Exited(0, time.time(), asked=False), 0), (Done(0), None)])
    heard = []

    def write_down(told: Told) -> None:
        if isinstance(told.event, Exited):  # to a folder that does not answer
            before, until = link.beats, time.monotonic() + 10
            while link.beats < before + 5 and time.monotonic() < until:
                time.sleep(0.01)
            heard.append(link.beats - before)

    links: Any = (link,)
    Supervisor(agents_of(links), {"alpha": Prepare((WorkerOrder(0),))}, write_down).run()
    assert heard[0] >= 5
