"""NIXL over UCX as an engine: one agent per port, transports limited to what the bridge may be."""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import functools
import importlib.util
import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hetctl.comm.bridge.engines.base import CannotRegister, Engine, EngineFailed, Evidence, Memory, Region, Wires
from hetctl.comm.contract.errors import reason_of

_MOST_IDLE = 256  # transfers that are over and kept: a few rings' slots
_SEGMENT = "512k"  # UCX's TCP default carried GPU buffers at 0.5 GB/s, this one at 3.6


class _TransferKey(NamedTuple):
    """Where bytes go from and to: a transfer that is over may start again for the same ones."""

    what: str
    peer: str
    kind: str
    number: int
    region: int  # the address it was registered by
    offset: int
    remote: int
    nbytes: int


@dataclass
class _Transfer:
    """The library's handle of a move, and whether it was seen to be over."""

    move: _TransferKey
    held: Any
    over: bool = False

    def release(self) -> None:
        with contextlib.suppress(Exception):  # it may be in any state; there is nothing else to do with it
            self.held.release()


class NixlEngine(Engine):
    def __init__(self, wires: Wires) -> None:
        for name, value in settings(wires, _log()).items():
            os.environ.setdefault(name, value)  # UCX reads the environment; what a person set is theirs
        use_the_systems_verbs()
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            config = nixl_agent_config(backends=[], enable_prog_thread=not wires.local)
            self._me = f"hetctl-{uuid.uuid4().hex}"
            self._agent: Any = nixl_agent(self._me, config)
            if "UCX" not in self._agent.plugin_list:
                raise RuntimeError("its UCX plugin is missing")
            self._agent.create_backend("UCX", port_settings(wires))
        except Exception as error:  # whatever a vendored library throws at its start
            raise EngineFailed(f"NIXL does not start: {reason_of(error)}") from None
        self._lock = threading.RLock()  # an agent is not safe across threads
        self._registered: dict[int, Any] = {}  # by address
        self._open: dict[int, _Transfer] = {}  # by our own handles: they must go before the agent
        self._idle: dict[_TransferKey, _Transfer] = {}  # that are over: making one costs more than starting it again
        self._numbers = itertools.count(1)
        self._written = self._read = 0
        self._closed, self._said = False, ""
        # Its thread sleeps until UCX wakes it, for which UCX puts a call of the host behind each peer copy: the next
        # one waits for that call, and half the rate is lost. Who waits for a transfer asks, and so moves UCX on.
        self._serves = wires.local

    def register(self, memory: Memory) -> Region:
        kind, number = ("DRAM", 0) if memory.device is None else ("VRAM", memory.device)
        with self._lock:
            try:
                held = self._agent.register_memory([(memory.address, memory.nbytes, number, "")], kind)
                metadata = self._agent.get_agent_metadata()
            except Exception as error:  # nixlBackendError and whatever else is bound
                raise CannotRegister(f"NIXL does not register {memory.what}: {reason_of(error)}") from None
            self._registered[memory.address] = held
        descriptor = {
            "name": self._me,
            "agent": base64.b64encode(metadata).decode("ascii"),
            "kind": kind,
            "device": number,
        }
        return Region(memory, descriptor)

    def deregister(self, region: Region) -> None:
        with self._lock:
            held = self._registered.pop(region.memory.address, None)
            for move in [m for m in self._idle if m.region == region.memory.address]:
                self._idle.pop(move).release()
            if held is not None:
                self._agent.deregister_memory(held)

    def connect(self, descriptor: Mapping[str, Any]) -> Any:
        name = str(descriptor["name"])
        if name != self._me:  # an agent knows itself
            with self._lock:
                try:
                    self._agent.add_remote_agent(base64.b64decode(descriptor["agent"]))
                except Exception as error:
                    raise EngineFailed(f"NIXL does not reach the peer: {reason_of(error)}") from None
        return name, descriptor["kind"], descriptor["device"]

    def post(self, peer: Any, region: Region, offset: int, *, there: int, nbytes: int, write: bool) -> Any:
        if write:
            self._written += nbytes
        else:
            self._read += nbytes
        what, (name, kind, number) = "WRITE" if write else "READ", peer
        move = _TransferKey(what, name, kind, number, region.memory.address, offset, there, nbytes)
        with self._lock:
            if self._closed:
                raise EngineFailed("NIXL was closed")
            try:
                transfer = self._idle.pop(move, None) or self._made(move, region)
                transfer.over = False
                if self._agent.transfer(transfer.held) == "ERR":
                    raise RuntimeError("it reported an error")
            except Exception as error:
                raise EngineFailed(f"NIXL does not start a transfer: {reason_of(error)}") from None
            number = next(self._numbers)
            self._open[number] = transfer
        return number

    def _made(self, move: _TransferKey, region: Region) -> _Transfer:
        """A transfer to start, as often as it has ended."""
        memory = region.memory
        mine = (memory.address + move.offset, move.nbytes, memory.device or 0)
        own = self._agent.get_xfer_descs([mine], "DRAM" if memory.device is None else "VRAM")
        theirs = self._agent.get_xfer_descs([(move.remote, move.nbytes, move.number)], move.kind)
        return _Transfer(move, self._agent.initialize_xfer(move.what, own, theirs, move.peer))

    def poll(self, handle: Any) -> bool:
        with self._lock:
            transfer = self._open.get(handle)
            if transfer is None:
                raise EngineFailed("NIXL was closed")
            try:
                state = self._agent.check_xfer_state(transfer.held)
            except Exception as error:
                raise EngineFailed(f"a transfer of NIXL failed: {reason_of(error)}") from None
            over = transfer.over = bool(state == "DONE")
        if state == "ERR":
            raise EngineFailed("a transfer of NIXL failed: the peer or the way to it is gone")
        return over

    def drop(self, handle: Any) -> None:
        with self._lock:
            transfer = self._open.pop(handle, None)
            if transfer is None:
                return
            if transfer.over and transfer.move not in self._idle and len(self._idle) < _MOST_IDLE:
                self._idle[transfer.move] = transfer
            else:
                transfer.release()

    def serve(self) -> bool:
        if self._serves:
            with self._lock:
                if not self._closed:
                    self._agent.get_new_notifs()  # moves UCX on; nobody sends any
        return self._serves

    def evidence(self) -> Evidence:
        """UCX's own account of the protocols it used (UCX_PROTO_INFO=used), which it writes when it is closed."""
        used = parse_protocols(self._said)
        staged = any(not p.startswith("zero-copy") for p in used) if used else None
        return Evidence(tuple(used), staged, len(self._registered), self._written, self._read)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            for transfer in (*self._open.values(), *self._idle.values()):
                transfer.release()
            self._open, self._idle = {}, {}
            self._closed = True
            for held in self._registered.values():
                with contextlib.suppress(Exception):  # all of them are tried
                    self._agent.deregister_memory(held)
            self._registered = {}
            before = len(_said())
            self._agent = None  # UCX now writes down what it used
            self._said = _said()[before:]


@functools.cache
def _log() -> Path:
    """UCX's log file: it opens one per process, when it is loaded, for all engines that there will be."""
    folder = tempfile.mkdtemp(prefix="hetctl-nixl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "ucx.log"


def _said() -> str:
    ctypes.CDLL(None).fflush(None)  # it writes into a buffered file
    return _log().read_text(errors="replace") if _log().exists() else ""


def settings(wires: Wires, log: Path) -> dict[str, str]:
    """The environment of UCX that lets it use these kinds of wires and no other, and write down what it used."""
    said = {
        "NIXL_LOG_LEVEL": "WARN",
        "UCX_PROTO_INFO": "used",
        "UCX_LOG_FILE": str(log),
        "UCX_LOG_LEVEL": "info",
        "UCX_ERROR_SIGNALS": "",
    }
    uncopied = {"UCX_ZCOPY_THRESH": "0"}  # left to itself UCX copies first where it thinks a way slow, or bytes few
    if wires.sockets:
        return {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": _SEGMENT, "UCX_TCP_RX_SEG_SIZE": _SEGMENT, **said}
    if wires.local:
        return {"UCX_TLS": "cuda_ipc,cuda_copy,rocm_ipc,rocm_copy,self,sm,tcp", **uncopied, **said}
    return {
        "UCX_TLS": "rc,ud",
        **uncopied,
        # its own look at the routes took those of the first port for the second one, in one process: discovery knows
        "UCX_IB_ROCE_REACHABILITY_MODE": "all",
        **said,
    }


def port_settings(wires: Wires) -> dict[str, str]:
    """What UCX is told for one engine alone: its port, and the GID that reaches the peers from there."""
    if wires.sockets or not wires.ports:
        return {}
    found = [f"NET_DEVICES={port}" for port in wires.ports]
    found += [f"IB_GID_INDEX={wire.gid_index}" for wire in wires.each_port if wire.gid_index is not None]
    return {"engine_config": ",".join(found)}


def parse_protocols(log: str) -> list[str]:
    """`zero-copy rc_mlx5/mlx5_0:1` for each way that UCX's tables of used protocols count remote accesses on.

    A table: a heading with `remote memory write by ucp_put*(...)`, then rows `| 6 | 0..inf | zero-copy | tcp/lo |`.
    """
    found: list[str] = []
    wanted = False
    for line in log.splitlines():
        cells = [c.strip() for c in line[line.find("|") :].strip("|").split("|")] if "|" in line else []
        if len(cells) == 1:
            wanted = cells[0].startswith("remote memory") or (wanted and " by ucp_" not in cells[0])
        elif wanted and len(cells) == 4 and cells[0].isdecimal() and int(cells[0]):
            found.append(f"{cells[2]} {cells[3]}")
    return list(dict.fromkeys(found))


_OURS = ("libibverbs", "libmlx5")
_PROVIDERS = "/usr/lib64/libibverbs"  # where the wheel's own libraries look for drivers


@functools.cache
def use_the_systems_verbs() -> None:
    """The NIXL wheel with the system's RDMA libraries in the place of its own, which find no device driver on Debian.

    A folder of links is made beside the wheel's files and imported from instead: nothing installed is touched. (Loading
    the system's library globally before the wheel's works too, but the two then crash each other when the process ends.
    So they do wherever the system has them, whatever the engine is used for.) Nothing is done where the wheel's own
    libraries do, or the system has none.
    """
    found = importlib.util.find_spec("nixl")
    system = {name: path for name in _OURS if (path := _path_of(f"{name}.so.1"))}
    if found is None or not found.origin or "libibverbs" not in system or os.path.isdir(_PROVIDERS):
        return
    folder = Path(tempfile.mkdtemp(prefix="hetctl-nixl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _link(Path(found.origin).parent.parent, folder, system)
    sys.path.insert(0, str(folder))


def _link(site: Path, folder: Path, system: dict[str, str]) -> None:
    """Folders are made anew and files linked: a library finds its neighbours by the path it was loaded by."""
    for part in site.iterdir():
        if not re.fullmatch(r"\.?nixl(_cu\d+|_rocm)?(\.libs|\.mesonpy\.libs)?", part.name) or not part.is_dir():
            continue
        for file in (p for p in part.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            place = folder / file.relative_to(site)
            place.parent.mkdir(parents=True, exist_ok=True)
            name = file.name.partition("-")[0]
            os.symlink(system.get(name, str(file)) if part.name.endswith(".libs") else str(file), place)


def _path_of(library: str) -> str | None:
    """Where the dynamic linker finds a library; None when it does not."""
    try:
        ctypes.CDLL(library)  # not global: nothing else sees it
    except OSError:
        return None
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        stem = library.partition(".so")[0]
        paths = [line.split()[-1] for line in maps if f"/{stem}.so" in line]
    return paths[0] if paths else None
