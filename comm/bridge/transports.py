"""The transports of one group: what the plan gives each pair of islands, and which way a pair of ranks really takes.

Where the plan says RDMA that is what both ends proved, agreed through the store.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import combinations
from typing import Any

import torch

from hetctl.comm.bridge.bridge import LaneKey, Transport
from hetctl.comm.bridge.connecting import ConnectWait
from hetctl.comm.bridge.device_memory import flush_for, registrable_device
from hetctl.comm.bridge.engines.base import PEER_COPY, EngineName
from hetctl.comm.bridge.engines.probe import EngineTrial, ability
from hetctl.comm.bridge.engines.shared import ENGINES, wires_here
from hetctl.comm.bridge.failover import RailWatch, say
from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.placement import Placement
from hetctl.comm.contract.transports import FALLBACK, TRANSPORTS, WITHIN_HOST, TransportKind, carriers
from hetctl.comm.contract.values import decode, encode
from hetctl.comm.operation.work import BridgeError, OperationDeadline, Store


@dataclass(frozen=True)
class Ability:
    """What one rank proved, and the name of its host."""

    trials: Mapping[EngineName, EngineTrial]
    host: str


@dataclass(frozen=True)
class TransportChoice:
    """The way between two ranks for one kind of memory, and why it is taken."""

    kind: TransportKind
    engine: EngineName | None
    reason: str
    label: str = ""  # what people call it


@dataclass(frozen=True)
class Making:
    """What a transport is made of: what was chosen, for tensors of which device, and what its group knows."""

    choice: TransportChoice
    device: torch.device
    watch: RailWatch
    local: bool  # whether every bridge over an engine has both ends on one host
    lost: Mapping[str, str]  # ports that the chosen engine cannot use, and why


def choose(
    mine: Ability,
    theirs: Ability,
    *,
    planned: TransportKind,
    forced: bool,
    on_device: bool,
    engines: tuple[EngineName, ...],
    pair: str,
) -> TransportChoice:
    """Direct where both ends registered device memory, else RDMA from host memory, else TCP; the same at both ends.

    A forced way that is impossible raises ConfigError. Host tensors of a direct bridge take host memory. Two ranks of
    one host share memory; a peer copy between their devices is taken only where direct was forced, RDMA never.
    """
    same_host, from_device = mine.host == theirs.host, TRANSPORTS[planned].device_memory
    if same_host and not (forced and from_device and on_device):
        if forced and not from_device:
            why = f"both ranks are on {mine.host}"
            raise ConfigError(f"the bridge {pair} cannot be {planned}: {why}", hint=f"--bridge {WITHIN_HOST}")
        return TransportChoice(WITHIN_HOST, None, f"both ranks are on {mine.host}", WITHIN_HOST)
    wanted = carriers(engine=True)[::-1] if not forced or from_device else [planned]
    refused = []
    for kind in wanted:
        if TRANSPORTS[kind].device_memory and not on_device:
            continue
        if forced and from_device and on_device and not TRANSPORTS[kind].device_memory:
            continue
        for engine in engines:
            missing = _missing(mine, theirs, kind, engine)
            if not missing:
                label = PEER_COPY if TRANSPORTS[kind].device_memory and same_host else kind
                return TransportChoice(kind, engine, f"both ends registered memory with {engine} and tried it", label)
            refused.append(f"{kind} with {engine}: {missing}")
    why = "; ".join(refused) or "no engine is asked for"
    if forced:
        raise ConfigError(f"the bridge {pair} cannot be {planned}: {why}", hint=f"--bridge auto, or {FALLBACK}")
    return TransportChoice(FALLBACK, None, why, FALLBACK)


def _missing(mine: Ability, theirs: Ability, kind: TransportKind, engine: EngineName) -> str:
    for end in (mine, theirs):
        trial = end.trials.get(engine, _UNTRIED)
        found = trial.device if TRANSPORTS[kind].device_memory else trial.host
        if found:
            return f"{end.host}: {found}"
    return ""


_UNTRIED = EngineTrial("it was not tried", "it was not tried")


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
                lost = self._mine.trials[choice.engine].lost if self._mine and choice.engine else {}
                module, _, function = TRANSPORTS[choice.kind].made_by.partition(":")
                making = Making(choice, key.device, self._watch, self._local, lost)
                self._made[name] = getattr(importlib.import_module(module), function)(making)
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
        trials = dict[EngineName, EngineTrial]()
        number = registrable_device()
        try:
            wires, lacking = wires_here(local=self._local and number is not None)
            for engine in self._engines():
                found = ability(engine, wires, number) if wires is not None else EngineTrial(lacking, lacking)
                if number is not None and not self._local and not found.device:
                    found = replace(found, device=flush_for(number)[1])
                trials[engine] = found
        except ConfigError:
            return  # whoever asks for a lane is told
        finally:
            self._mine = Ability(trials, self._host(self._rank))
            self._store.set(f"ability/{self._rank}", json.dumps(encode(self._mine)))
            self._tried.set()

    def _engines(self) -> tuple[Any, ...]:
        """Which engines may be used, in the order of preference."""
        asked = os.environ.get(variables.ENGINE)
        if asked and asked not in ENGINES:
            raise ConfigError(f"{variables.ENGINE}={asked} is no engine", hint=" or ".join(ENGINES))
        return (asked,) if asked else ENGINES

    def _choice(self, key: LaneKey) -> TransportChoice:
        found = self._chosen.get((key.peer, key.on_device))
        if found is not None:
            return found
        if not self._tried.wait(self._timeout.total_seconds()) or self._mine is None:
            raise BridgeError("the engines of the direct bridge were not tried in time")
        connect_wait = ConnectWait(lambda: None).within(OperationDeadline(self._timeout.total_seconds()))
        published = json.loads(connect_wait.value_of(self._store, f"ability/{key.peer}"))
        theirs = decode(Ability, published, where=f"the ability of rank {key.peer}")
        one, other = self._islands(key.peer)
        planned = self._placement.transport(one, other)
        found = choose(
            self._mine,
            theirs,
            planned=planned,
            forced=self._placement.is_forced(one, other),
            on_device=key.on_device,
            engines=self._engines(),
            pair=f"{one} - {other}",
        )
        if found.kind != planned and self._rank < key.peer:
            say(f"the bridge {one} - {other} takes {found.label}, not {planned}: {found.reason}")
        self._chosen[key.peer, key.on_device] = found
        return found
