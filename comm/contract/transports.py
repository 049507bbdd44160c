"""The one table of transports: what may join two islands, what that needs, who makes it, what planners assume of it.

A further transport is one row here (and its word in `TransportKind`, which files are checked against).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

TransportKind = Literal["direct", "rdma", "tcp", "shm", "native"]


@dataclass(frozen=True)
class TransportRow:
    """One way between two islands. `reached` to `unknown_rate` hold where nothing was measured."""

    made_by: str  # module:function, given a `bridge.transports.Making`: by name, as only ranks have torch
    reached: float  # share of the links' rate
    latency_s: float
    unknown_rate: float  # bytes per second of one rank's lane where the links do not tell theirs
    engine: bool = False  # both ends must prove it first, with an engine for registered memory
    device_memory: bool = False  # what is registered is the device's memory: nothing is staged on hosts
    # of the seconds of sums that a pass hides, those that it takes longer for them, as one Python launches the kernels
    # of both: between nothing and half on five machines (docs/benchmarks/170, 306, 307, 308)
    hiding_cost: float = 0.25
    # seconds that a block's pass takes at most with that cost: a longer one loses nothing, its kernels being launched
    # ahead of it (over sockets: docs/benchmarks/318; over shm replicas of 8B may still lose, docs/benchmarks/306)
    launching_s: float = inf
    # what a rank's threads carry themselves, launching nothing meanwhile: sums over sockets of 6 to 8 GB/s took beside
    # a program that launches as long as both in turn (docs/benchmarks/302). None: others carry them
    carried_bytes_per_s: float | None = None

    def taken(self, rate: float) -> float:
        """Of the seconds of sums at such a rate that a pass hides, the share that it takes longer for them."""
        return self.hiding_cost * min(1.0, rate / (self.carried_bytes_per_s or rate))


NATIVE: TransportKind = "native"  # no bridge: the vendor's own library over sockets, between islands of one vendor
WITHIN_HOST: TransportKind = "shm"  # what two ranks of one host take where an engine was planned
FALLBACK: TransportKind = "tcp"  # what reaches everywhere

TRANSPORTS: dict[str, TransportRow] = {
    "shm": TransportRow("hetctl.comm.bridge.shm:make", 0.90, 20e-6, 8e9),
    "tcp": TransportRow(
        "hetctl.comm.bridge.tcp:make", 0.50, 100e-6, 2e9, hiding_cost=1.0, launching_s=18e-3, carried_bytes_per_s=6e9
    ),
    "rdma": TransportRow("hetctl.comm.bridge.direct:make", 0.90, 30e-6, 10e9, engine=True),
    "direct": TransportRow("hetctl.comm.bridge.direct:make", 0.95, 10e-6, 20e9, engine=True, device_memory=True),
    NATIVE: TransportRow("", 0.50, 50e-6, 2e9, hiding_cost=0.0),
}


def carriers(*, engine: bool | None = None) -> list[TransportKind]:
    """The transports that bridges have, the nearest first; those over an engine, or without one, where asked for."""
    found = (kind for kind, row in TRANSPORTS.items() if row.made_by and engine in (None, row.engine))
    return list(found)  # type: ignore[arg-type]
