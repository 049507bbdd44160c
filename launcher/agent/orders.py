"""What an agent is told: one frozen type per order, one JSON object a line: {"do": its kind, its fields}."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hetctl.comm.contract.events import Line
from hetctl.comm.contract.values import decode


@dataclass(frozen=True)
class Order(Line, key="do"):
    """Anything told to an agent."""


@dataclass(frozen=True)
class WorkerOrder:
    """One rank's process."""

    rank: int
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    cwd: str | None = None


@dataclass(frozen=True)
class StoreOrder:
    """The run's store: where it listens (on the first of the ports that is free), and the process that serves it."""

    address: str
    ports: tuple[int, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    clients: int = 0  # ranks that connect to it


@dataclass(frozen=True)
class WatchedPort:
    """A network port that the run uses."""

    name: str
    rdma: str | None = None
    rdma_port: int | None = None


@dataclass(frozen=True)
class Prepare(Order, kind="spec"):
    """What a host is to run: its workers, the run's files (path -> text), the store if it is here."""

    workers: tuple[WorkerOrder, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # texts are `packed`
    store: StoreOrder | None = None
    probe_address: str | None = None  # where other hosts knock
    secret: str = ""  # of the run, by which its hosts know each other
    private: str | None = None  # the host's own run folder; None: the launcher's, whose files it sees
    reconnect: bool = False
    flight: str = ""  # the folder of flight recorders
    unheard: str = ""  # the file of figures that no launcher has heard of
    goes_on: bool = False  # with what an earlier attempt did
    sweep: tuple[str, ...] = ()  # patterns of files that are half-made once the ranks are gone
    ports: tuple[WatchedPort, ...] = ()
    bundles: tuple[str, ...] = ()  # that the ranks run from: they stay as long as it runs
    lease_s: float = 0.0
    grace_s: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(worker.rank for worker in self.workers)


@dataclass(frozen=True)
class Start(Order, kind="start"):
    """Every host is ready: start the workers, and knock at these hosts (name -> address and port) from time to time."""

    store_port: int
    peers: Mapping[str, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop(Order, kind="stop"):
    """End the workers within so many seconds; `failed`: because one of the run's ranks has."""

    grace_s: float = 0.0
    failed: bool = False


@dataclass(frozen=True)
class Kill(Order, kind="kill"):
    """End the workers at once."""


@dataclass(frozen=True)
class Signal(Order, kind="signal"):
    """Send the workers a signal, by its name."""

    name: str


@dataclass(frozen=True)
class Beat(Order, kind="beat"):
    """The supervisor is there, and so are `others` of the run's hosts, whose ranks may ask the store."""

    others: bool = False


@dataclass(frozen=True)
class Part(Order, kind="part"):
    """The last word was heard."""


@lru_cache(maxsize=8)
def packed(text: str) -> str:
    """A file's text as it travels: that of 10,000 ranks is megabytes, the same for all hosts, and shrinks well."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpacked(packed: str) -> str:
    """The text of a packed file."""
    return zlib.decompress(base64.b64decode(packed)).decode()


def order_of(line: Mapping[str, Any]) -> Order:
    """A line's order. Raises ConfigError."""
    kind, values = line[Order.key], {k: v for k, v in line.items() if k not in (Order.key, "got")}
    order: Order = decode(Order.kinds[kind], values, where=kind)
    return order
