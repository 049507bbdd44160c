"""The supervisor: gives agents their orders, passes on what happens, stops everything, and verifies the end."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hetctl.comm.contract import events
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.events import Told
from hetctl.launcher.agent.orders import Kill, Order, Prepare, Signal, Start, Stop
from hetctl.launcher.hosts.fanout import MAX_AT_ONCE
from hetctl.launcher.run_folder.failure import Exit, RankError, is_own, parse_rank_error, reason_of
from hetctl.launcher.supervisor.agents import Agents

LEASE_S = 15.0
STOP_GRACE_S = 60.0  # a rank finishes its step and saves
END_GRACE_S = 3.0  # a rank whose peers are gone has nothing to finish
READY_S = 60.0  # without any host that becomes ready
WIND_UP_S = 10.0
NEIGHBOURS = 4  # hosts that each host knocks at, beside the store's


@dataclass
class RunOutcome:
    """How a run ended: every rank's exit, processes left behind (0 when verified), and whether it was stopped."""

    exits: list[Exit] = field(default_factory=list)
    errors: dict[int, RankError] = field(default_factory=dict)
    # what ranks waited for when they failed
    pending: dict[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    left: int = 0
    unverified: list[str] = field(default_factory=list)  # hosts that could not say that nothing is left
    lost: list[str] = field(default_factory=list)  # hosts that stopped answering
    interrupted: bool = False
    signal: int | None = None  # the first that interrupted it
    links: list[dict[str, Any]] = field(default_factory=list)  # ports that became worse, or well again, and when
    ended_early: bool = False  # asked to save and end: a success

    @property
    def clear(self) -> bool:
        """Every host says that nothing of it is left."""
        return self.left == 0 and not self.unverified


class Supervisor:
    """One run from orders (`specs`: what each host's agent is to prepare) to verified end."""

    def __init__(self, agents: Agents, specs: Mapping[str, Prepare], on_event: Callable[[Told], None]) -> None:
        self.agents, self.specs, self.on_event = agents, specs, on_event
        self.outcome = RunOutcome()
        self._links = {link.host: link for link in agents.links}
        self._events: queue.SimpleQueue[Told | Order] = queue.SimpleQueue()  # signal handlers put orders
        self._done: set[str] = set()
        self._ended: set[int] = set()
        agents.heartbeat.others = lambda: len(self._done) + 1 < len(self.specs)
        self._begun = False  # a rank reported work: stopping it can be polite
        self._ending = False

    def run(self) -> RunOutcome:
        """Give the orders and see the run through. Raises WorkFailed when a host does not get ready."""
        with closing(self.agents):
            try:
                for link in self.agents.links:
                    link.watch(self._events)
                self._start(self._prepare())
                self._loop()
            finally:
                self._wind_up()
        return self.outcome

    def stop(self) -> None:
        """Ask for an early end: ranks finish their step and save. A second call ends them at once."""
        self._events.put(Kill() if self.outcome.interrupted else Stop())
        self.outcome.interrupted = True

    def save(self, *, then_end: bool) -> bool:
        """Ask the ranks to save, and to go on or to end. False when they are not that far yet."""
        if self._begun:
            self.outcome.ended_early |= then_end
            self._events.put(Signal("SIGUSR2" if then_end else "SIGUSR1"))
        return self._begun

    def _prepare(self) -> dict[str, events.Ready] | None:
        """Give each host its spec, a number of them at a time, as the disks that they share are written by each.

        What each host says once it is ready; None where somebody asks for an early end.
        """
        ready: dict[str, events.Ready] = {}
        waiting = iter(self.specs.items())
        until = time.monotonic() + READY_S
        for host, spec in islice(waiting, MAX_AT_ONCE):
            self._links[host].send(spec)
        while len(ready) < len(self.specs):
            item = self._next()
            if item is None and time.monotonic() < until:
                continue
            if item is None:
                raise WorkFailed("the hosts did not get ready in time", hint="see the agents' messages above")
            if isinstance(item, Order):
                return None
            match item.event:
                case events.Ready() as event:
                    ready[item.host] = event
                    until = time.monotonic() + READY_S
                    for host, spec in islice(waiting, 1):
                        self._links[host].send(spec)
                case events.Refused(reason):
                    raise WorkFailed(f"{item.host} cannot start its ranks: {reason}")
                case events.StoreLost(how):
                    raise WorkFailed(f"the run's store on {item.host} {how}")
                case events.Gone(_, reason):
                    self._done.add(item.host)
                    raise WorkFailed(f"{item.host} cannot start its ranks: {reason or 'its agent ended'}")
                case events.Lost() as event:
                    self._done.add(item.host)
                    raise WorkFailed(f"{item.host} cannot start its ranks: {self._how_lost(item.host, event)}")
        return ready

    def _start(self, ready: Mapping[str, events.Ready] | None) -> None:
        """Have every host start its ranks: with the store's port, and whom each host knocks at."""
        if ready is None:
            self._broadcast(Kill())
            return
        port = next(r.store_port for r in ready.values() if r.store_port)
        addresses = {site.name: site.data_address for site in self.agents.sites}
        for number, host in enumerate(self.specs):
            peers = {
                peer: (addresses[peer], probe)
                for peer in _peers(number, self.specs)
                if (probe := ready[peer].probe_port)
            }
            self._links[host].send(Start(port, peers))

    def _loop(self) -> None:
        while len(self._done) < len(self.specs):
            event = self._next()
            if event is not None:
                self._handle(event)

    def _next(self) -> Told | Order | None:
        """What comes within a moment."""
        try:
            return self._events.get(timeout=0.2)
        except queue.Empty:
            return None

    def _handle(self, item: Told | Order) -> None:
        if isinstance(item, Order):
            grace_s = STOP_GRACE_S if self._begun else END_GRACE_S
            self._broadcast(Stop(grace_s) if isinstance(item, Stop) else item)
            return
        host = item.host
        match item.event:
            case events.Begin():
                self._begun = True
            case events.Exited() as event:
                self._exited(item.source, event)
            case events.Failing() as event:
                self._failing(item.source, event)
            case events.PortChanged(nic, problem):
                self.outcome.links.append({"host": host, "nic": nic, "problem": problem, "at": time.time()})
            case events.PeerUnreachable(peer, address):
                sentence = f"{host} cannot reach {peer} at {address}: the data network is cut between them"
                # agents that end close what others knock at
                self._fail(self.specs[host].ranks[0], sentence, asked=self._ending or self.outcome.interrupted)
            case events.StoreLost(how):
                sentence = f"the run's store on {host} {how}"
                self._fail(self.specs[host].ranks[0], sentence, asked=self.outcome.interrupted)
            case events.Lost(left) as event:
                self._host_ended(host, f"{self._how_lost(host, event)}, and its ranks with it", left=left)
            case events.Done(left):
                self.outcome.left += left
                self._done.add(host)
                self.agents.heartbeat.beat()  # the store's host may be the last: it waits for that
            case events.Gone(_, reason) if host not in self._done:
                self.outcome.lost.append(host)
                self.outcome.unverified.append(host)
                self._host_ended(host, f"{host} stopped answering{f' ({reason})' if reason else ''}", left=0)
        self.on_event(item)

    def _how_lost(self, host: str, event: events.Lost) -> str:
        said = self._links[host].complaint() if event.failed else ""
        return f"its agent failed{f' ({said})' if said else ''}" if event.failed else "its agent was killed"

    def _wind_up(self) -> None:
        """Whatever the way out was: agents that still work end their ranks, and say so."""
        until = time.monotonic() + WIND_UP_S
        if len(self._done) < len(self.specs):
            self._broadcast(Kill())
        while len(self._done) < len(self.specs) and time.monotonic() < until:
            item = self._next()
            if isinstance(item, Told) and isinstance(item.event, (events.Done, events.Gone, events.Lost)):
                self._done.add(item.host)

    def _failing(self, rank: int, event: events.Failing) -> None:
        """A rank wrote down an error: it is about to end."""
        self._note_error(rank, event.error)
        self._announce(Exit(rank, 1, event.at))
        self._end_all()

    def _note_error(self, rank: int, written: Any) -> None:
        if written and (error := parse_rank_error(written)):
            self.outcome.errors[rank] = error

    def _exited(self, rank: int, event: events.Exited) -> None:
        self._ended.add(rank)
        self._note_error(rank, event.error)
        if event.pending:
            self.outcome.pending[rank] = event.pending
        exit_ = Exit(rank, event.code, event.at, event.asked, event.reason, event.oom, event.said)
        self.outcome.exits.append(exit_)
        if event.code != 0:
            self._announce(exit_)
            self._end_all()

    def _host_ended(self, host: str, reason: str, *, left: int) -> None:
        self.outcome.left += left
        self._done.add(host)
        for rank in self.specs[host].ranks:
            if rank not in self._ended:  # a host is lost, not told to end, also where its ranks' peers noticed first
                known = is_own(self.outcome.errors.get(rank))  # it had said why before
                self._fail(rank, None if known else reason, asked=self.outcome.interrupted)
                self._ended.add(rank)

    def _fail(self, rank: int, reason: str | None, *, asked: bool) -> None:
        exit_ = Exit(rank, 1, time.time(), asked, reason, seen=False)
        self.outcome.exits.append(exit_)
        self._announce(exit_)
        self._end_all()

    def _announce(self, exit_: Exit) -> None:
        """Say the first failure as soon as it is known; the verdict over all exits comes at the end."""
        if not (self._ending or exit_.asked):
            host = next(host for host, spec in self.specs.items() if exit_.rank in spec.ranks)
            reason = reason_of(exit_, self.outcome.errors.get(exit_.rank))
            self.on_event(Told(events.RankFailed(reason), host, exit_.rank))

    def _end_all(self) -> None:
        """One rank has failed: its peers can only wait for it now."""
        if not self._ending:
            self._ending = True
            self._broadcast(Stop(END_GRACE_S, failed=True))

    def _broadcast(self, order: Order) -> None:
        for host in self.specs:
            if host not in self._done:
                self._links[host].send(order)


def _peers(number: int, specs: Mapping[str, Prepare]) -> list[str]:
    """The hosts that one host knocks at: the next few in the ring, and the store's."""
    hosts = list(specs)
    ring = [hosts[(number + step) % len(hosts)] for step in range(1, NEIGHBOURS + 1)]
    return [host for host in (*ring, *(h for h in hosts if specs[h].store)) if host != hosts[number]]
