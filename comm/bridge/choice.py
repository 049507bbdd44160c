"""Which way a pair of ranks really takes where the plan says RDMA: what both ends proved, agreed through the store."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from hetctl.comm.bridge.bridge import Transport
from hetctl.comm.bridge.connecting import ConnectWait
from hetctl.comm.bridge.engines.base import PEER_COPY, EngineName
from hetctl.comm.bridge.failover import RailWatch
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.transports import FALLBACK, TRANSPORTS, WITHIN_HOST, TransportKind, carriers
from hetctl.comm.operation.c10d import Store
from hetctl.comm.operation.work import OperationDeadline


@dataclass(frozen=True)
class Ability:
    """What one rank proved: per engine why host and why device memory cannot be used, '' where they can."""

    host: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  # of its host


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


def make(making: Making) -> Transport:
    """The transport that was chosen, by what its row names."""
    module, _, function = TRANSPORTS[making.choice.kind].made_by.partition(":")
    made: Transport = getattr(importlib.import_module(module), function)(making)
    return made


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
    same_host, from_device = mine.name == theirs.name, TRANSPORTS[planned].device_memory
    if same_host and not (forced and from_device and on_device):
        if forced and not from_device:
            why = f"both ranks are on {mine.name}"
            raise ConfigError(f"the bridge {pair} cannot be {planned}: {why}", hint=f"--bridge {WITHIN_HOST}")
        return TransportChoice(WITHIN_HOST, None, f"both ranks are on {mine.name}", WITHIN_HOST)
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
        found = (end.device if TRANSPORTS[kind].device_memory else end.host).get(engine, "it was not tried")
        if found:
            return f"{end.name}: {found}"
    return ""


def publish(store: Store, rank: int, ability: Ability) -> None:
    """Let the other ranks of a group know."""
    about = {"host": dict(ability.host), "device": dict(ability.device), "name": ability.name}
    store.set(f"ability/{rank}", json.dumps(about))


def ability_of(store: Store, rank: int, timeout: timedelta) -> Ability:
    """What another rank published; waits for it. Raises RuntimeError."""
    connect_wait = ConnectWait(lambda: None).within(OperationDeadline(timeout.total_seconds()))
    found: dict[str, Any] = json.loads(connect_wait.value_of(store, f"ability/{rank}"))
    return Ability(found["host"], found["device"], found["name"])
