"""Which engine enters a host, and one opener for whatever runs commands on hosts: probes, agents, doctors, people."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.engines import ray_cluster, slurm, started
from hetctl.launcher.engines.engine import Engine, Place
from hetctl.launcher.engines.kubernetes import Kubernetes, end_pods
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import Shell

if TYPE_CHECKING:
    from hetctl.launcher.ssh.config import SshConfig


class OverSsh(Engine):
    """Hosts over SSH, and this machine without it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._book: SshConfig | None = None

    def check(self, places: Sequence[Place], run: str | None, say: Callable[[str], None]) -> None:
        """Whom SSH reaches shows when it tries."""

    def open(self, place: Place, deadline: Deadline) -> Shell:
        assert place.access is not None
        if place.access.local:
            return LocalShell()
        from hetctl.launcher.ssh.config import SshConfig  # paramiko takes 0.2 s that a local run need not pay
        from hetctl.launcher.ssh.connect import connect

        with self._lock:
            self._book = self._book or SshConfig()
        return connect(place.access, self._book, deadline)

    def close(self) -> None:
        if self._book is not None:
            self._book.close()


ENGINES: Mapping[str, Callable[[], Engine]] = {
    "ssh": OverSsh,
    "slurm": slurm.Slurm,
    "ray": ray_cluster.Ray,
    started.NONE: started.Started,
    "kubernetes": Kubernetes,
}
# what ends that which an engine made for a run's hosts, and with it whatever runs there
RELEASES: Mapping[str, Callable[[str, Mapping[str, Access]], None]] = {"kubernetes": end_pods}
# which hosts of a lost run can still be entered, where not all can
STILL_OPEN: Mapping[str, Callable[[Mapping[str, Access]], Mapping[str, Access]]] = {started.NONE: started.enterable}
WAYS = (*ENGINES, "local")  # what --launcher takes; `local` refuses whatever is not this machine


def choose_way(asked: str, hosts: Sequence[Place]) -> str:
    """One of WAYS; `auto` is what the hosts say, else srun inside an allocation, else SSH.

    Raises ConfigError, also for `none` where this process leads no job (`started.take_part`).
    """
    if asked == "auto":
        told = {host.access.way for host in hosts if host.access and not host.access.local}
        if len(told) > 1:
            names = ", ".join(sorted(way or "ssh" for way in told))
            raise ConfigError(f"hosts of the cluster are entered in unlike ways ({names})", hint="name one: --launcher")
        return (told and told.pop()) or ("slurm" if slurm.inside() else "ssh")
    if asked not in WAYS:
        raise ConfigError(f"--launcher {asked} is not known", hint=f"{', '.join(WAYS[:-1])} or {WAYS[-1]}")
    if asked == started.NONE and not started.doors():
        raise ConfigError(
            "this run's hosts are entered through processes that torchrun or mpirun started",
            hint=f"... --launcher {started.NONE}",
        )
    return asked


class Entrance:
    """Opens shells on hosts in one way, or (None) in that of each host; what it took is let go in the end."""

    def __init__(self, way: str | None = None) -> None:
        self.way = "ssh" if way == "local" else way
        self._held = slurm.components() if way is None and slurm.inside() else {}
        self._lock = threading.Lock()
        self._engines: dict[str, Engine] = {}

    def __enter__(self) -> Entrance:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(
        self, places: Sequence[Place], run: str | None = None, say: Callable[[str], None] = lambda said: None
    ) -> None:
        """Have the engines take what these hosts need, for a run or only to be entered. Raises HetctlError."""
        ways: dict[str, list[Place]] = {}
        for place in places:
            ways.setdefault(self.way or self._way_of(place), []).append(place)
        for way, some in ways.items():
            self._engine(way).check(some, run, say)

    def open(self, place: Place, deadline: Deadline) -> Shell:
        """A shell on a host. Raises ShellError."""
        return self._engine(self.way or self._way_of(place)).open(place, deadline)

    def address(self, place: Place, interface: str | None) -> tuple[str, str] | None:
        """Where ranks talk on a host, where its engine knows better than the cluster file."""
        return self._engine(self.way or self._way_of(place)).address(place, interface)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _way_of(self, place: Place) -> str:
        """As it says itself; a node of the allocation that we are in is entered by a step, which asks for no SSH."""
        access = place.access
        if access is not None and access.way:
            return access.way
        return "slurm" if access is not None and not access.local and place.name in self._held else "ssh"

    def _engine(self, way: str) -> Engine:
        with self._lock:
            if way not in self._engines:
                self._engines[way] = ENGINES[way]()
            return self._engines[way]
