"""The engines that a process has, one per port: started when first used, closed by the last user, who tells of them."""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings

from hetctl.comm.bridge.connecting import own_address
from hetctl.comm.bridge.engines.base import Engine, EngineFailed, EngineName, EnginePort, Wire, Wires
from hetctl.comm.bridge.engines.counters import port_counters
from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.events import EngineAccount, Reporter

ENGINES: tuple[EngineName, ...] = ("nixl", "mooncake")
PACKAGES = {"nixl": "nixl", "mooncake": "mooncake"}  # the modules they are imported as


def installed(engine: EngineName) -> bool:
    return importlib.util.find_spec(PACKAGES[engine]) is not None


def start(engine: EngineName, wires: Wires) -> Engine:
    """A new engine. Raises EngineFailed."""
    if engine == "nixl":
        from hetctl.comm.bridge.engines.nixl import NixlEngine

        return NixlEngine(wires)
    from hetctl.comm.bridge.engines.mooncake import MooncakeEngine

    return MooncakeEngine(wires)


def wires_here(*, local: bool = False) -> tuple[Wires | None, str]:
    """The wires that this process was given, and why it has none. `local`: peers are on this host."""
    text = os.environ.get(variables.RDMA, "")
    words = text.split(",")
    if set(words) == {"sockets"}:
        return Wires(tuple(Wire(f"sockets{n}") for n in range(len(words))), own_address(), sockets=True), ""
    if local:
        return Wires(address=own_address(), local=True), ""
    if not text:
        return None, f"this host's facts name no RDMA port that reaches the other island ({variables.RDMA} is not set)"
    found: dict[str, Wire] = {}
    for word in words:
        rest, _, network = word.partition("@")
        port, _, index = rest.partition("=")
        if not port or port in found or (index and not index.isdecimal()):
            raise ConfigError(f"{variables.RDMA}={text!r} is no list of RDMA ports", hint="rxe0:1=1@roce0,mlx5_0:1")
        found[port] = Wire(port, int(index) if index else None, network)
    return Wires(tuple(found.values()), own_address()), ""


class SharedEngines:
    """Running engines, what they were used for, and the port counters from before.

    The last user to let go closes them and tells of them.
    """

    def __init__(self, name: EngineName, wires: Wires) -> None:
        self.name, self.wires, self.users = name, wires, 0
        self.before = port_counters(wires.ports)
        self.rails = self._start()
        self.lost: dict[str, str] = {}
        self._used_for: set[str] = set()
        self._sent = self._staged = 0

    def _start(self) -> tuple[EnginePort, ...]:
        found: list[EnginePort] = []
        try:
            for one in self.wires.each():
                network = one.each_port[0].network if one.each_port else ""
                found.append(EnginePort(one.name, network, start(self.name, one)))
        except BaseException:
            for rail in found:
                rail.engine.close()
            raise
        return tuple(found)

    def lose(self, port: str, why: str) -> bool:
        """A port is not used, or no more: keep it for the account; whether this is news."""
        with _lock:
            news = port not in self.lost
            self.lost.setdefault(port, why)
        return news

    def close(self, *, way: str, sent: int, staged: int) -> None:
        """A user lets go. `way` is what it was for, `staged` how many of the `sent` bytes stopped in host memory."""
        with _lock:
            self.users -= 1
            self._used_for.add(way)
            self._sent += sent
            self._staged += staged
            last = self.users == 0
            if last:
                del _held[self.name]
        if last:
            for rail in self.rails:
                rail.engine.close()
            account = self._account()
            if account.buffered_by_engine:
                ways, how = ", ".join(account.ways), ", ".join(account.transports)
                said = f"{self.name} carried the bridge ({ways}) through buffers in host memory: {how}"
                warnings.warn(said, stacklevel=2)
            Reporter(active=True).emit(account)

    def _account(self) -> EngineAccount:
        found = [rail.engine.evidence() for rail in self.rails]
        buffered = [one.staged for one in found if one.staged is not None]
        after = port_counters(self.wires.ports)
        counters = {
            port: {n: [v, after.get(port, {}).get(n)] for n, v in all_.items()} for port, all_ in self.before.items()
        }
        return EngineAccount(
            engine=self.name,
            ways=tuple(sorted(self._used_for)),
            sent_bytes=self._sent,
            staged_bytes=self._sent if any(buffered) else self._staged,
            buffered_by_engine=any(buffered) if buffered else None,
            transports=tuple(way for one in found for way in one.transports),
            rails={
                rail.port: {"written_bytes": one.written_bytes, "read_bytes": one.read_bytes}
                for rail, one in zip(self.rails, found, strict=True)
            },
            lost=dict(self.lost),
            port_counters=counters,
            registered=sum(one.registered for one in found),
            written_bytes=sum(one.written_bytes for one in found),
            read_bytes=sum(one.read_bytes for one in found),
        )


_lock = threading.Lock()
_held: dict[EngineName, SharedEngines] = {}


def use(name: EngineName, wires: Wires) -> SharedEngines:
    """The process's engines, with one user more. Raises EngineFailed, also where they already run over other wires."""
    with _lock:
        held = _held.get(name)
        if held is None:
            held = _held[name] = SharedEngines(name, wires)
        elif held.wires != wires:
            raise EngineFailed(f"{name} runs in this process already, over {held.wires.name}")
        held.users += 1
    return held
