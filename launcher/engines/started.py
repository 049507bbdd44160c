"""Hosts of a job that torchrun, mpirun or srun has started (`--launcher none`): rank 0 leads, one process on each host
opens its door to it, and the others wait. What leads runs commands on hosts through their doors, as over SSH.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError, HetctlError, WorkFailed
from hetctl.comm.contract.started import address_towards, as_torchrun_says
from hetctl.launcher.engines import door_client
from hetctl.launcher.engines.engine import Engine, Place
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalSession, LocalShell
from hetctl.launcher.hosts.shell import Shell

NONE = "none"
MEETING_S, LEAVING_S, LOOK_S = 300.0, 10.0, 0.5


@dataclass(frozen=True)
class Door:
    """Where commands for a host are taken, by whom."""

    host: str
    boot: str  # of its machine
    address: str
    port: int
    python: str


_doors: dict[str, Door] = {}
_token = ""


def doors() -> dict[str, Door]:
    """Each host of the job that this process leads, its own first; none where it leads none."""
    return dict(_doors)


def enterable(hosts: Mapping[str, Access]) -> dict[str, Access]:
    """Those of a lost job's hosts that need no door: this machine. Elsewhere what it ran ends with its processes."""
    return {name: access for name, access in hosts.items() if name == _this_host()}


def take_part() -> None:
    """Meet the job's other processes. Returns in the one that leads; the others serve it, and exit.

    Raises ConfigError where nothing has started them, WorkFailed where they do not meet.
    """
    global _token
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    store, rank, world = _met()
    towards = address_towards(os.environ["MASTER_ADDR"])
    mine = socket.create_server((towards, 0), backlog=64)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    door = Door(_this_host(), boot, towards, mine.getsockname()[1], sys.executable)
    store.set(f"door/{rank}", json.dumps(asdict(door)))
    if rank:
        _serve(mine, store.get("token").decode(), store)
        sys.exit(0)
    mine.close()
    _token = secrets.token_hex(16)
    for other in (Door(**json.loads(store.get(f"door/{r}"))) for r in range(world)):
        if (known := _doors.setdefault(other.host, other)).boot != other.boot:
            raise ConfigError(f"two machines are called {other.host}: {known.address} and {other.address}")
    if len(_doors) > 1 and (lonely := [d.host for d in _doors.values() if d.address.startswith("127.")]):
        hint = "export MASTER_ADDR as the address of rank 0's host"
        raise ConfigError(f"{lonely[0]} has only a loopback address towards MASTER_ADDR", hint=hint)
    store.set("token", _token)
    atexit.register(_dismiss, store, world)


def _this_host() -> str:
    return socket.gethostname().split(".")[0]


def _end_with_parent(parent: int) -> None:
    """End when whoever started this process is gone, as a run does whose launcher is told to; others at once."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    if not _token:
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _met() -> tuple[Any, int, int]:
    """The job's store, this process's rank, and how many there are."""
    os.environ.update(as_torchrun_says(os.environ))
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if lacking:
        raise ConfigError(
            f"--launcher none is for processes that torchrun, mpirun or srun started: {', '.join(lacking)} is not set",
            hint="torchrun --nnodes 2 --nproc-per-node 1 ... -m hetctl train ... --launcher none, on each host",
        )
    import torch.distributed as dist  # whoever started these has it

    try:
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=MEETING_S))))
    except (RuntimeError, ValueError) as error:
        raise WorkFailed(f"the job's processes did not meet: {str(error).splitlines()[0]}") from None
    return dist.PrefixStore("hetctl/doors/", store), rank, world


def _dismiss(store: Any, world: int) -> None:
    """Let the others go, and see them off: one of them may have the store from us."""
    with contextlib.suppress(RuntimeError):
        store.set("over", "")
        end = time.monotonic() + LEAVING_S
        while store.add("left", 0) < world - 1 and time.monotonic() < end:
            time.sleep(0.02)


# --- whoever waits ---


def _serve(listener: socket.socket, token: str, store: Any) -> None:
    """Take commands until the leader lets us go. Exits with 1 where it is gone: what we started ends with us."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever leads hears of it too, and ends the run in order
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_accept, args=(listener, token), daemon=True).start()
    try:
        while not store.check(["over"]):
            time.sleep(LOOK_S)
        store.add("left", 1)
    except RuntimeError:
        os._exit(1)


def _accept(listener: socket.socket, token: str) -> None:
    while True:
        channel, _ = listener.accept()
        threading.Thread(target=_attend, args=(channel, token), daemon=True).start()


def _attend(channel: socket.socket, token: str) -> None:
    """One command, from its first frame to its exit code; it is ended when nobody listens any more."""
    with channel, contextlib.suppress(OSError, ValueError, TypeError):
        channel.settimeout(30.0)
        asked = json.loads(door_client.receive(channel)[1])
        if not hmac.compare_digest(str(asked["token"]), token):
            return
        channel.settimeout(None)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            session = LocalShell().start(asked["argv"], deadline=Deadline(30.0))
        except HetctlError as error:
            door_client.send(channel, door_client.REFUSED, error.message.encode())
            return
        with contextlib.closing(session):
            threading.Thread(target=_feed, args=(channel, session), daemon=True).start()
            while not session.ended:
                if piece := session.read(1.0):
                    kind = door_client.OUT if piece.stream == "out" else door_client.ERR
                    door_client.send(channel, kind, piece.data)
            door_client.send(channel, door_client.EXIT, str(session.exit_code).encode())


def _feed(channel: socket.socket, session: LocalSession) -> None:
    try:
        while True:
            _, data = door_client.receive(channel)
            if not data:
                session.finish()
            while data:
                data = data[session.write(data) :]
                time.sleep(0.005 if data else 0)
    except OSError:
        session.abort()


# --- whoever leads ---


class DoorShell(LocalShell):
    """Commands through a host's door."""

    def __init__(self, door: Door) -> None:
        super().__init__((sys.executable, "-I", "-S", door_client.__file__, door.address, str(door.port), "--"))

    def start(self, argv: Sequence[str], *, deadline: Deadline) -> LocalSession:
        session = super().start(argv, deadline=deadline)
        session.write(f"{_token}\n".encode())
        return session


class Started(Engine):
    """The hosts of the job that this process leads."""

    def check(self, places: Sequence[Place], run: str | None, say: Callable[[str], None]) -> None:
        """Raise ConfigError naming hosts that the job has no process on."""
        if strangers := [p.name for p in places if p.name not in _doors]:
            raise ConfigError(
                f"no process of this job is on {', '.join(strangers[:8])} (there are on {', '.join(list(_doors)[:8])})",
                hint="start one on each host, and have the cluster found anew: leave out --cluster",
            )

    def open(self, place: Place, deadline: Deadline) -> Shell:
        """Commands through the host's door; here without one."""
        deadline.phase = f"entering {place.name}"
        return LocalShell() if place.name == _this_host() else DoorShell(_doors[place.name])

    def close(self) -> None:
        """The job's processes stay until this one exits."""
