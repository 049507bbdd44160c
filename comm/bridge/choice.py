"""Which way a pair of ranks really takes where the plan says RDMA: what both ends proved, agreed through the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hetctl.comm.bridge.connecting import ConnectWait
from hetctl.comm.bridge.engines.base import PEER_COPY, EngineName
from hetctl.comm.contract.cluster import TransportKind
from hetctl.comm.contract.errors import ConfigError
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
    same_host = mine.name == theirs.name
    if same_host and not (forced and planned == "direct" and on_device):
        if forced and planned == "rdma":
            raise ConfigError(f"the bridge {pair} cannot be rdma: both ranks are on {mine.name}", hint="--bridge shm")
        return TransportChoice("shm", None, f"both ranks are on {mine.name}", "shm")
    wanted: list[TransportKind] = ["direct", "rdma"] if not forced or planned == "direct" else ["rdma"]
    refused = []
    for kind in wanted:
        if kind == "direct" and not on_device:
            continue
        if kind == "rdma" and forced and planned == "direct" and on_device:
            continue
        for engine in engines:
            missing = _missing(mine, theirs, kind, engine)
            if not missing:
                label = PEER_COPY if kind == "direct" and same_host else kind
                return TransportChoice(kind, engine, f"both ends registered memory with {engine} and tried it", label)
            refused.append(f"{kind} with {engine}: {missing}")
    why = "; ".join(refused) or "no engine is asked for"
    if forced:
        raise ConfigError(f"the bridge {pair} cannot be {planned}: {why}", hint="--bridge auto, or tcp")
    return TransportChoice("tcp", None, why, "tcp")


def _missing(mine: Ability, theirs: Ability, kind: TransportKind, engine: EngineName) -> str:
    for end in (mine, theirs):
        found = (end.device if kind == "direct" else end.host).get(engine, "it was not tried")
        if found:
            return f"{end.name}: {found}"
    return ""


def publish(store: Store, rank: int, ability: Ability) -> None:
    """Let the other ranks of a group know."""
    about = {"host": dict(ability.host), "device": dict(ability.device), "name": ability.name}
    store.set(f"ability/{rank}", json.dumps(about))


def ability_of(store: Store, rank: int, timeout: timedelta) -> Ability:
    """What another rank published; waits for it. Raises RuntimeError."""
    patience = ConnectWait(lambda: None).within(OperationDeadline(timeout.total_seconds()))
    found: dict[str, Any] = json.loads(patience.said(store, f"ability/{rank}"))
    return Ability(found["host"], found["device"], found["name"])
