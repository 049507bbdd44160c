"""The supervisor: gives agents their orders, passes on what happens, stops everything, and verifies the end."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetctl.comm.contract.errors import WorkFailed
from hetctl.launcher.run_folder.failure import Exit, RankError, is_own, parse_rank_error, reason_of
from hetctl.launcher.supervisor.agent_link import Event
from hetctl.launcher.supervisor.agents import Agents

BEAT_S = 2.0
LEASE_S = 15.0
STOP_GRACE_S = 60.0  # a rank finishes its step and saves
END_GRACE_S = 3.0  # a rank whose peers are gone has nothing to finish
READY_S = 60.0
WIND_UP_S = 10.0
NEIGHBOURS = 4  # hosts that each host knocks at, beside the store's


@dataclass(frozen=True)
class HostSpec:
    """What one host's agent is given: the workers (rank, argv, env, log), files, and the store if it hosts it."""

    host: str
    workers: tuple[dict[str, Any], ...]
    data_address: str
    files: Mapping[str, str] = field(default_factory=dict)
    store: Mapping[str, Any] | None = None  # store_address, store_ports, store_argv, store_env
    private: str | None = None  # the host's own run folder; None: the launcher's, whose files it sees
    reconnect: bool = False
    flight: str = ""
    ports: tuple[dict[str, Any], ...] = ()  # network ports that its ranks use, to be watched
    unheard: str = ""  # file of figures that no launcher has heard of
    goes_on: bool = False  # with what an earlier attempt did
    sweep: tuple[str, ...] = ()  # patterns of files that are half-made once the ranks are gone

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(w["rank"] for w in self.workers)


@dataclass
class RunOutcome:
    """How a run ended: every rank's exit, processes left behind (0 when verified), and whether it was stopped."""

    exits: list[Exit] = field(default_factory=list)
    errors: dict[int, RankError] = field(default_factory=dict)
    pending: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # what ranks waited for when they failed
    left: int = 0
    unverified: list[str] = field(default_factory=list)  # hosts that could not say that nothing is left
    lost: list[str] = field(default_factory=list)  # hosts that stopped answering
    interrupted: bool = False
    signal: int | None = None  # the first that interrupted it
    links: list[dict[str, Any]] = field(default_factory=list)  # ports that became worse, or well again, and when
    ended_early: bool = False  # asked to save and end: a success


class Supervisor:
    """One run from orders to verified end."""

    def __init__(self, agents: Agents, specs: Sequence[HostSpec], on_event: Callable[[Event], None]) -> None:
        self.agents, self.specs, self.on_event = agents, specs, on_event
        self.outcome = RunOutcome()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # signal handlers may put
        self._done: set[str] = set()
        self._ended: set[int] = set()
        self._begun = False  # a rank reported work: stopping it can be polite
        self._ending = False

    def run(self) -> RunOutcome:
        """Give the orders and see the run through. Raises WorkFailed when a host does not get ready."""
        try:
            for link in self.agents.links:
                link.watch(self._events)
            for spec in self.specs:
                self._link(spec.host).send(_orders(spec))
            self._broadcast(self._wait_ready())
            self._loop()
        finally:
            self._wind_up()
            self.agents.close()
        return self.outcome

    def stop(self) -> None:
        """Ask for an early end: ranks finish their step and save. A second call ends them at once."""
        self._events.put({"event": "order", "host": "", "do": "kill" if self.outcome.interrupted else "stop"})
        self.outcome.interrupted = True

    def save(self, *, then_end: bool) -> bool:
        """Ask the ranks to save, and to go on or to end. False when they are not that far yet."""
        if self._begun:
            self.outcome.ended_early |= then_end
            name = "SIGUSR2" if then_end else "SIGUSR1"
            self._events.put({"event": "order", "host": "", "do": "signal", "name": name})
        return self._begun

    def _wait_ready(self) -> Event:
        """The order to start, once every host is ready: the store's port, and whom each host knocks at."""
        probes: dict[str, int | None] = {}
        port, due = 0, 0.0
        until = time.monotonic() + READY_S
        while len(probes) < len(self.specs):
            due = self._beat(due)
            event = self._next()
            if event is None and time.monotonic() < until:
                continue
            if event is None:
                raise WorkFailed("the hosts did not get ready in time", hint="see the agents' messages above")
            if event["event"] == "order":
                return {"do": "kill"}
            if event["event"] == "ready":
                probes[event["host"]] = event["probe_port"]
                port = event["store_port"] or port
            elif event["event"] in ("failed", "gone", "lost"):
                self._done |= {event["host"]} if event["event"] != "failed" else set()
                raise WorkFailed(f"{event['host']} cannot start its ranks: {event.get('reason') or 'its agent ended'}")
        return {"do": "start", "store_port": port, "probes": probes}

    def _loop(self) -> None:
        next_beat = 0.0
        while len(self._done) < len(self.specs):
            next_beat = self._beat(next_beat)
            event = self._next()
            if event is not None:
                self._handle(event)

    def _beat(self, due: float) -> float:
        if time.monotonic() < due:
            return due
        self._broadcast({"do": "beat"})
        return time.monotonic() + BEAT_S

    def _next(self) -> Event | None:
        try:
            return self._events.get(timeout=0.2)
        except queue.Empty:
            return None

    def _handle(self, event: Event) -> None:
        kind, host = event["event"], event["host"]
        if kind == "order":
            grace = STOP_GRACE_S if self._begun else END_GRACE_S
            self._broadcast({**event, "grace_s": grace})
            return
        if kind == "begin":
            self._begun = True
        elif kind == "exit":
            self._exit(event)
        elif kind == "failing":
            self._failing(event)
        elif kind == "link":
            about = {"host": host, "nic": event["nic"], "problem": event["problem"], "at": time.time()}
            self.outcome.links.append(about)
        elif kind == "unreachable":
            sentence = (
                f"{host} cannot reach {event['peer']} at {event['address']}: the data network is cut between them"
            )
            # agents that end close what others knock at
            self._fail(self._spec(host).ranks[0], sentence, asked=self._ending or self.outcome.interrupted)
        elif kind == "lost":
            self._host_ended(host, "its agent was killed, and its ranks with it", left=event["left"])
        elif kind == "done":
            self.outcome.left += event["left"]
            self._done.add(host)
        elif kind == "gone" and host not in self._done:
            self.outcome.lost.append(host)
            self.outcome.unverified.append(host)
            detail = f" ({event['reason']})" if event.get("reason") else ""
            self._host_ended(host, f"{host} stopped answering{detail}", left=0)
        self.on_event(event)

    def _wind_up(self) -> None:
        """Whatever the way out was: agents that still work end their ranks, and say so."""
        until = time.monotonic() + WIND_UP_S
        if len(self._done) < len(self.specs):
            self._broadcast({"do": "kill"})
        while len(self._done) < len(self.specs) and time.monotonic() < until:
            event = self._next()
            if event is not None and event["event"] in ("done", "gone", "lost"):
                self._done.add(event["host"])

    def _failing(self, event: Event) -> None:
        """A rank wrote down an error: it is about to end."""
        self._note_error(event)
        self._announce(Exit(event["rank"], 1, event["at"]))
        self._end_all()

    def _note_error(self, event: Event) -> None:
        if event.get("error") and (error := parse_rank_error(event["error"])):
            self.outcome.errors[event["rank"]] = error

    def _exit(self, event: Event) -> None:
        rank, code = event["rank"], event["code"]
        self._ended.add(rank)
        self._note_error(event)
        if event.get("pending"):
            self.outcome.pending[rank] = event["pending"]
        told = Exit(rank, code, event["at"], event["asked"], event.get("reason"), event.get("oom"), event.get("said"))
        self.outcome.exits.append(told)
        if code != 0:
            self._announce(told)
            self._end_all()

    def _host_ended(self, host: str, reason: str, *, left: int) -> None:
        self.outcome.left += left
        self._done.add(host)
        for rank in self._spec(host).ranks:
            if rank not in self._ended:  # a host is lost, not told to end, also where its ranks' peers noticed first
                known = is_own(self.outcome.errors.get(rank))  # it had said why before
                self._fail(rank, None if known else reason, asked=self.outcome.interrupted)
                self._ended.add(rank)

    def _fail(self, rank: int, reason: str | None, *, asked: bool) -> None:
        told = Exit(rank, 1, time.time(), asked, reason, seen=False)
        self.outcome.exits.append(told)
        self._announce(told)
        self._end_all()

    def _announce(self, told: Exit) -> None:
        """Say the first failure as soon as it is known; the verdict over all exits comes at the end."""
        if not (self._ending or told.asked):
            host = next(s.host for s in self.specs if told.rank in s.ranks)
            reason = reason_of(told, self.outcome.errors.get(told.rank))
            self.on_event({"event": "failed", "rank": told.rank, "host": host, "reason": reason})

    def _end_all(self) -> None:
        """One rank has failed: its peers can only wait for it now."""
        if not self._ending:
            self._ending = True
            self._broadcast({"do": "stop", "grace_s": END_GRACE_S, "failed": True})

    def _spec(self, host: str) -> HostSpec:
        return next(s for s in self.specs if s.host == host)

    def _link(self, host: str) -> Any:
        return next(link for link in self.agents.links if link.host == host)

    def _broadcast(self, message: Event) -> None:
        for number, spec in enumerate(self.specs):
            if message["do"] == "start":
                message = {**message, "peers": _peers(number, self.specs, message["probes"])}
            if spec.host not in self._done:
                self._link(spec.host).send(message)


def _orders(spec: HostSpec) -> Event:
    return {
        "do": "spec",
        "workers": spec.workers,
        "files": dict(spec.files),
        **(spec.store or {}),
        "probe_address": spec.data_address if spec.reconnect else None,
        "private": spec.private,
        "reconnect": spec.reconnect,
        "flight": spec.flight,
        "unheard": spec.unheard,
        "goes_on": spec.goes_on,
        "sweep": spec.sweep,
        "ports": spec.ports,
        "lease_s": LEASE_S,
        "grace_s": END_GRACE_S,
    }


def _peers(number: int, specs: Sequence[HostSpec], probes: Mapping[str, int | None]) -> dict[str, tuple[str, int]]:
    """The hosts that one host knocks at: the next few in the ring, and the store's."""
    ring = [specs[(number + step) % len(specs)] for step in range(1, NEIGHBOURS + 1)]
    wanted = [s for s in (*ring, *(s for s in specs if s.store)) if s.host != specs[number].host]
    found = {}
    for spec in wanted:
        port = probes.get(spec.host)
        if port:
            found[spec.host] = (spec.data_address, port)
    return found
