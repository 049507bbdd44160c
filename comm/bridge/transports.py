"""The transports of one group: what the plan gives each pair of islands, and what both ends prove first."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import combinations
from typing import Any

from hetctl.comm.bridge.bridge import LaneKey, Transport
from hetctl.comm.bridge.choice import Ability, Making, TransportChoice, ability_of, choose, make, publish
from hetctl.comm.bridge.device_memory import flush_for, registrable_device
from hetctl.comm.bridge.engines.base import EngineName
from hetctl.comm.bridge.engines.probe import EngineTrial, ability
from hetctl.comm.bridge.engines.shared import ENGINE_VARIABLE, ENGINES, wires_here
from hetctl.comm.bridge.failover import RailWatch, say
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.placement import Placement
from hetctl.comm.contract.transports import FALLBACK, TRANSPORTS, TransportKind
from hetctl.comm.operation.c10d import Store
from hetctl.comm.operation.work import BridgeError


class TransportSelector:
    """Chooses and keeps the transports; one object of each kind, shared by peers."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        placement: Placement,
        store: Store,
        *,
        timeout: timedelta,
        watch: RailWatch,
    ) -> None:
        self._rank, self._ranks, self._placement = rank, ranks, placement
        self._store, self._timeout, self._watch = store, timeout, watch
        self._made: dict[Any, Transport] = {}
        self._chosen: dict[tuple[int, bool], TransportChoice] = {}
        self._lock = threading.Lock()
        self._mine: Ability | None = None
        self._tried = threading.Event()
        self._lost: dict[EngineName, Mapping[str, str]] = {}  # ports that an engine cannot use, and why

    def prepare(self) -> None:
        """Where the plan says RDMA for a pair of this rank's island: try the engines, and let the others know."""
        if any(TRANSPORTS[self._planned(peer)].engine for peer in range(len(self._ranks))):
            threading.Thread(target=self._try, name="het engines, trying", daemon=True).start()

    def to(self, key: LaneKey) -> Transport:
        """What carries a lane. Raises ConfigError where a forced way is impossible."""
        kind = self._planned(key.peer)
        choice = self._choice(key) if TRANSPORTS[kind].engine else TransportChoice(kind, None, "planned", kind)
        with self._lock:
            name = (choice.kind, choice.engine)
            if name not in self._made:
                lost = self._lost.get(choice.engine, {}) if choice.engine is not None else {}
                self._made[name] = make(Making(choice, key.device, self._watch, self._local, lost))
            return self._made[name]

    def _planned(self, peer: int) -> TransportKind:
        mine, theirs = self._islands(peer)
        return FALLBACK if mine == theirs else self._placement.transport(mine, theirs)

    def _islands(self, peer: int) -> tuple[str, str]:
        place = self._placement.island_of_rank
        return place[self._ranks[self._rank]].name, place[self._ranks[peer]].name

    def _host(self, peer: int) -> str:
        hosts, world = self._placement.hosts, self._ranks[peer]
        return hosts[world] if world < len(hosts) else f"rank {world}"

    @cached_property
    def _local(self) -> bool:
        """Whether every bridge over an engine has both ends on one host: all ranks say the same of it."""
        hosts = dict[str, set[str]]()
        for number, rank in enumerate(self._ranks):
            hosts.setdefault(self._placement.island_of_rank[rank].name, set()).add(self._host(number))
        needing = [p for p in combinations(hosts, 2) if TRANSPORTS[self._placement.transport(*p)].engine]
        return all(len(hosts[one] | hosts[other]) == 1 for one, other in needing)

    def _try(self) -> None:
        host, device = dict[str, str](), dict[str, str]()
        number = registrable_device()
        try:
            wires, lacking = wires_here(local=self._local and number is not None)
            for engine in self._engines():
                found = ability(engine, wires, number) if wires is not None else EngineTrial(lacking, lacking)
                host[engine], device[engine], self._lost[engine] = found.host, found.device, found.lost
                if number is not None and not self._local and not device[engine]:
                    device[engine] = flush_for(number)[1]
        except ConfigError as error:
            host["engine"] = error.message
        finally:
            self._mine = Ability(host, device, self._host(self._rank))
            publish(self._store, self._rank, self._mine)
            self._tried.set()

    def _engines(self) -> tuple[Any, ...]:
        """Which engines may be used, in the order of preference."""
        asked = os.environ.get(ENGINE_VARIABLE)
        if asked and asked not in ENGINES:
            raise ConfigError(f"{ENGINE_VARIABLE}={asked} is no engine", hint=" or ".join(ENGINES))
        return (asked,) if asked else ENGINES

    def _choice(self, key: LaneKey) -> TransportChoice:
        on_device = key.device.type != "cpu"
        found = self._chosen.get((key.peer, on_device))
        if found is not None:
            return found
        if not self._tried.wait(self._timeout.total_seconds()) or self._mine is None:
            raise BridgeError("the engines of the direct bridge were not tried in time")
        theirs = ability_of(self._store, key.peer, self._timeout)
        one, other = self._islands(key.peer)
        planned = self._placement.transport(one, other)
        found = choose(
            self._mine,
            theirs,
            planned=planned,
            forced=self._placement.is_forced(one, other),
            on_device=on_device,
            engines=self._engines(),
            pair=f"{one} - {other}",
        )
        if found.kind != planned and self._rank < key.peer:
            say(f"the bridge {one} - {other} takes {found.label}, not {planned}: {found.reason}")
        self._chosen[key.peer, on_device] = found
        return found
