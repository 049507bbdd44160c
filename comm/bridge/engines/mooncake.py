"""The Mooncake transfer engine behind the adapter: peers are found by its own handshake, without a metadata server."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from hetctl.comm.bridge.engines.base import CannotRegister, Engine, EngineFailed, Evidence, Memory, Region, Wires
from hetctl.comm.bridge.engines.counters import is_down
from hetctl.comm.contract.errors import reason_of

_DONE, _WAITING = 1, 0


class MooncakeEngine(Engine):
    def __init__(self, wires: Wires) -> None:
        for name, value in settings(wires).items():
            os.environ.setdefault(name, value)
        self._protocol = "tcp" if wires.sockets else "rdma"
        devices = [] if wires.sockets else [port.partition(":")[0] for port in wires.ports]
        try:
            from mooncake.engine import TransferEngine

            self._engine: Any = TransferEngine()
            code = self._engine.initialize(wires.address, "P2PHANDSHAKE", self._protocol, ",".join(devices))
        except Exception as error:  # whatever a vendored library throws at its start
            raise EngineFailed(f"Mooncake does not start: {reason_of(error)}") from None
        if code != 0:
            raise EngineFailed(f"Mooncake does not start over {self._protocol} {','.join(devices)} (code {code})")
        self._me = f"{wires.address}:{self._engine.get_rpc_port()}"
        self._ports = wires.ports
        self._lock = threading.RLock()
        self._registered: set[int] = set()
        self._written = self._read = 0

    def register(self, memory: Memory) -> Region:
        with self._lock:
            code = self._engine.register_memory(memory.address, memory.nbytes)
            if code != 0:
                raise CannotRegister(f"Mooncake does not register {memory.what} (code {code})")
            self._registered.add(memory.address)
        return Region(memory, {"segment": self._me})

    def deregister(self, region: Region) -> None:
        with self._lock:
            if region.memory.address in self._registered:
                self._registered.discard(region.memory.address)
                self._engine.unregister_memory(region.memory.address)

    def connect(self, descriptor: Mapping[str, Any]) -> Any:
        return str(descriptor["segment"])

    def post(self, peer: Any, region: Region, offset: int, *, there: int, nbytes: int, write: bool) -> Any:
        self._check_ports()
        mine = region.memory.address + offset
        if not write:  # over when it returns: its reads have no handle that could be asked without waiting
            code = self._engine.transfer_sync_read(peer, mine, there, nbytes)
            if code != 0:
                raise EngineFailed(f"a transfer of Mooncake failed (code {code})")
            self._read += nbytes
            return None
        with self._lock:
            batch = self._engine.transfer_submit_write(peer, mine, there, nbytes)
        if batch < 0:
            raise EngineFailed("Mooncake does not start a transfer: it does not reach the peer's memory")
        self._written += nbytes
        return batch

    def poll(self, handle: Any) -> bool:
        if handle is None:
            return True
        with self._lock:
            code = self._engine.transfer_check_status(handle)
        if code not in (_DONE, _WAITING):
            raise EngineFailed(f"a transfer of Mooncake failed (code {code}): the peer or the way to it is gone")
        return bool(code == _DONE)

    def _check_ports(self) -> None:
        """Mooncake itself ends the process with SIGSEGV when it is given work for a port that has gone down."""
        down = [port for port in self._ports if is_down(port)]
        if down:
            raise EngineFailed(f"the port {', '.join(down)} is down")

    def drop(self, handle: Any) -> None:
        """It frees a batch when its end is seen, and the others with itself."""

    def evidence(self) -> Evidence:
        """It tells nothing but what it was started with: the port counters beside it must show the bytes."""
        ways = tuple(f"{self._protocol}/{port}" for port in self._ports) or (self._protocol,)
        staged = None if self._protocol == "rdma" else True
        return Evidence(ways, staged, len(self._registered), self._written, self._read)

    def close(self) -> None:
        with self._lock:
            for address in self._registered:
                self._engine.unregister_memory(address)
            self._registered = set()


def settings(wires: Wires) -> dict[str, str]:
    """Its environment, one for all engines of a process: the GID that reaches the peers, where all ports say the same.

    Left alone it chooses among a port's GIDs by itself.
    """
    found = {"MC_LOG_LEVEL": "WARNING", "GLOG_minloglevel": "1"}
    index = next((wire.gid_index for wire in wires.each_port), None)
    if wires.alike and index is not None:
        found["MC_GID_INDEX"] = str(index)
    return found
