"""Which engine enters a host, and one opener for whatever runs commands on hosts: probes, agents, doctors, people."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.engines import slurm
from hetctl.launcher.engines.engine import Engine, Place
from hetctl.launcher.engines.kubernetes import Kubernetes, end_pods
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import Shell

if TYPE_CHECKING:
    from hetctl.launcher.ssh.config import SshConfig


class OverSsh:
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

    def address(self, place: Place, interface: str | None) -> tuple[str, str] | None:
        """Machines keep their addresses."""
        return None

    def close(self) -> None:
        if self._book is not None:
            self._book.close()


ENGINES: Mapping[str, Callable[[], Engine]] = {"ssh": OverSsh, "slurm": slurm.Slurm, "kubernetes": Kubernetes}
# what ends that which an engine made for a run's hosts, and with it whatever runs there
RELEASES: Mapping[str, Callable[[str, Mapping[str, Access]], None]] = {"kubernetes": end_pods}
WAYS = (*ENGINES, "local")  # what --launcher takes; `local` refuses whatever is not this machine


def choose_way(asked: str, hosts: Sequence[Place] = ()) -> str:
    """One of WAYS; `auto` is srun inside an allocation, pods where all hosts are pods, else SSH. Raises ConfigError."""
    if asked == "auto":
        pods = [place.access is not None and place.access.kubernetes is not None for place in hosts]
        return "slurm" if slurm.inside() else "kubernetes" if pods and all(pods) else "ssh"
    if asked not in WAYS:
        raise ConfigError(f"--launcher {asked} is not known", hint=f"{', '.join(WAYS[:-1])} or {WAYS[-1]}")
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
        """Get hold of these hosts, for a run or for this command only. Raises HetctlError, as their engines do."""
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
        """A pod is entered as one; a node of the allocation that we are in by a step, which asks for no SSH."""
        access = place.access
        if access is not None and access.kubernetes is not None:
            return "kubernetes"
        return "slurm" if access is not None and not access.local and place.name in self._held else "ssh"

    def _engine(self, way: str) -> Engine:
        with self._lock:
            if way not in self._engines:
                self._engines[way] = ENGINES[way]()
            return self._engines[way]
