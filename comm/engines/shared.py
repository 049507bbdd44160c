"""The one engine of each kind that a process has: started when first used, closed by its last user, who tells of it."""

from __future__ import annotations

import importlib.util
import os
import threading
from dataclasses import asdict
from typing import Any

from hetctl.comm.addresses import own_address
from hetctl.comm.engines.base import Engine, EngineFailed, EngineName, Wires
from hetctl.comm.engines.counters import port_counters
from hetctl.comm.errors import ConfigError
from hetctl.comm.placement import PORTS_VARIABLE
from hetctl.comm.reporter import Reporter

ENGINE_VARIABLE = "HETCTL_ENGINE"  # nixl or mooncake; else the first that both ends have
ENGINES: tuple[EngineName, ...] = ("nixl", "mooncake")
PACKAGES = {"nixl": "nixl", "mooncake": "mooncake"}  # the modules they are imported as


def installed(engine: EngineName) -> bool:
    return importlib.util.find_spec(PACKAGES[engine]) is not None


def start(engine: EngineName, wires: Wires) -> Engine:
    """A new engine. Raises EngineFailed."""
    if engine == "nixl":
        from hetctl.comm.engines.nixl import NixlEngine

        return NixlEngine(wires)
    from hetctl.comm.engines.mooncake import MooncakeEngine

    return MooncakeEngine(wires)


def wires_here(*, local: bool = False) -> tuple[Wires | None, str]:
    """The wires that this process was given, and why it has none. `local`: peers are on this host."""
    text = os.environ.get(PORTS_VARIABLE, "")
    if text == "sockets":
        return Wires(address=own_address(), sockets=True), ""
    if local:
        return Wires(address=own_address(), local=True), ""
    if not text:
        return None, f"this host's facts name no RDMA port that reaches the other island ({PORTS_VARIABLE} is not set)"
    ports, indices = [], []
    for word in text.split(","):
        port, _, index = word.partition("=")
        if not port or (index and not index.isdecimal()):
            raise ConfigError(f"{PORTS_VARIABLE}={text!r} is no list of RDMA ports", hint="rxe0:1=1,mlx5_0:1")
        ports.append(port)
        indices.append(int(index) if index else None)
    return Wires(tuple(ports), tuple(indices), own_address()), ""


class Use:
    """One user's hold on the process's engine of a name; the last one to let go closes it and tells of it."""

    def __init__(self, held: _Held) -> None:
        self.engine, self._held, self._open = held.engine, held, True

    def close(self, *, way: str, sent: int, staged: int | None) -> None:
        """Let go. `way` is what the engine was used for, `staged` how many of the `sent` bytes stopped on the host."""
        if self._open:
            self._open = False
            self._held.let_go(way, sent, staged)


class _Held:
    """A running engine, what it was used for, and the port counters from before."""

    def __init__(self, name: EngineName, wires: Wires) -> None:
        self.name, self.wires, self.users = name, wires, 0
        self.before = port_counters(wires.ports)
        self.engine = start(name, wires)
        self._ways: set[str] = set()
        self._sent, self._staged = 0, [0]

    def let_go(self, way: str, sent: int, staged: int | None) -> None:
        with _lock:
            self.users -= 1
            self._ways.add(way)
            self._sent += sent
            self._staged = self._staged if staged is None else [*self._staged, staged]
            last = self.users == 0
            if last:
                del _held[self.name]
        if last:
            self.engine.close()
            Reporter(active=True).emit("bridge", **self._account())

    def _account(self) -> dict[str, Any]:
        found = asdict(self.engine.evidence())
        buffered = found.pop("staged")
        after = port_counters(self.wires.ports)
        counters = {
            port: {n: [v, after.get(port, {}).get(n)] for n, v in all_.items()} for port, all_ in self.before.items()
        }
        return {
            "ways": sorted(self._ways),
            "sent_bytes": self._sent,
            "staged_bytes": sum(self._staged),
            "buffered_by_engine": buffered,
            "port_counters": counters,
            **found,
        }


_lock = threading.Lock()
_held: dict[EngineName, _Held] = {}


def use(name: EngineName, wires: Wires) -> Use:
    """A hold on the process's engine. Raises EngineFailed, also where it already runs over other wires."""
    with _lock:
        held = _held.get(name)
        if held is None:
            held = _held[name] = _Held(name, wires)
        elif held.wires != wires:
            raise EngineFailed(f"{name} runs in this process already, over {held.wires.ports or 'local ways'}")
        held.users += 1
    return Use(held)
