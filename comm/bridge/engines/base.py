"""The adapter every engine of the direct bridge offers: register, connect, post, poll, evidence, close."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from hetctl.comm.contract.errors import BridgeError

EngineName = Literal["nixl", "mooncake"]
PEER_COPY = "same-host peer copy"  # what `direct` is between two devices of one host: no RDMA


class CannotRegister(BridgeError):
    """Memory that the NIC does not take: there is no way on from here, least of all by staging."""


class EngineFailed(BridgeError):
    """The engine did not start, or a transfer of it failed."""


@dataclass(frozen=True)
class Memory:
    """Contiguous bytes of this process: on the host, or on a device of this index."""

    address: int
    nbytes: int
    device: int | None = None

    @property
    def what(self) -> str:
        return f"{self.nbytes} bytes of {'host memory' if self.device is None else f'device {self.device}'}"


@dataclass(frozen=True)
class Wire:
    """One RDMA port of this host (`mlx5_0:1`), or what stands for one where engines take their own sockets."""

    port: str
    gid_index: int | None = None  # None: the library chooses
    network: str = ""  # '': one that nobody named


@dataclass(frozen=True)
class Wires:
    """What engines may use: RDMA ports, or their own sockets, to try them without any.

    `address` is this host's, for the engine's handshakes.
    """

    each_port: tuple[Wire, ...] = ()
    address: str = "127.0.0.1"
    sockets: bool = False
    local: bool = False  # both ends are on one host: device memory takes the driver's peer copy
    alike: bool = True  # all ports of this host have the same GID index

    def each(self) -> tuple[Wires, ...]:
        """One port each: an engine of its own goes over every port."""
        alike = len({wire.gid_index for wire in self.each_port}) < 2
        return tuple(replace(self, each_port=(wire,), alike=alike) for wire in self.each_port) or (self,)

    def without(self, ports: Iterable[str]) -> Wires:
        """Those that are left when some ports are not used."""
        gone = set(ports)
        return replace(self, each_port=tuple(wire for wire in self.each_port if wire.port not in gone))

    @property
    def ports(self) -> tuple[str, ...]:
        return tuple(wire.port for wire in self.each_port)

    @property
    def name(self) -> str:
        """What people call them."""
        return ", ".join(self.ports) or ("local ways" if self.local else "sockets")


@dataclass(frozen=True)
class Evidence:
    """What an engine can prove: by which transports bytes really went, and how they left this process's memory."""

    transports: tuple[str, ...] = ()  # `zero-copy rc_mlx5/mlx5_0:1`; empty where it does not say
    staged: bool | None = None  # whether any transfer was buffered on its way; None: the engine does not tell
    registered: int = 0  # regions now
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class Region:
    """A registered piece of memory, and what a peer needs to reach it (plain values: it travels as JSON)."""

    memory: Memory
    descriptor: Mapping[str, Any]


class Engine(Protocol):
    """One engine in this process. All calls may come from any thread."""

    def register(self, memory: Memory) -> Region:
        """Raises CannotRegister."""

    def deregister(self, region: Region) -> None: ...

    def connect(self, descriptor: Mapping[str, Any]) -> Any:
        """The peer that owns a region, by its descriptor. Raises EngineFailed."""

    def post(self, peer: Any, region: Region, offset: int, *, there: int, nbytes: int, write: bool) -> Any:
        """Start writing [offset, offset + nbytes) of a region of ours to the peer's address `there`, or reading it from
        there; a handle to poll."""

    def poll(self, handle: Any) -> bool:
        """Whether a transfer is over, memory at both ends included. Raises EngineFailed when it failed."""

    def drop(self, handle: Any) -> None:
        """Forget a transfer, ended or not."""

    def serve(self) -> bool:
        """Do what peers' transfers need of this end; whether it has to be called again while they last."""
        return False  # it has threads for that

    def evidence(self) -> Evidence: ...

    def close(self) -> None:
        """Release everything that is registered, and the engine."""


@dataclass(frozen=True)
class EnginePort:
    """One port with an engine of its own."""

    port: str
    network: str
    engine: Engine
