"""A launch: ranks on the hosts of a cluster, all that follows from who sits where, and their agents on those hosts.

`train`, `run`, `bench` and `validate` all start ranks so: `Launch.of`, `start_agents_on`, `supervise`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from hetctl.comm.contract.cluster import Access, Cluster, Host, Member
from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.comm.contract.natives import native_of
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement
from hetctl.comm.contract.plan import Plan, PlannedBridge, PlannedIsland, planned_islands
from hetctl.comm.contract.transports import NATIVE
from hetctl.comm.contract.units import count_of
from hetctl.launcher.agent.orders import WatchedPort
from hetctl.launcher.engines.entrance import RELEASES, Entrance
from hetctl.launcher.hosts.bundle import code_bundle, folder_bundle
from hetctl.launcher.hosts.folder_files import FolderFiles
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import OnFile, refuse_supervised
from hetctl.launcher.supervisor.agents import AgentRequest, Agents, TargetHost, start_agent_here, start_agents
from hetctl.launcher.supervisor.console import Console
from hetctl.launcher.supervisor.environment import (
    Seat,
    Setting,
    device_type,
    host_settings,
    interface_of,
    ports_of,
)
from hetctl.launcher.supervisor.ship import Shipment, ship
from hetctl.launcher.supervisor.supervisor import LEASE_S


@dataclass(frozen=True)
class Launch:
    """Ranks on a cluster's hosts: seats, what ranks know of islands and bridges, what they compute on."""

    cluster: Cluster
    seats: tuple[Seat, ...]
    islands: tuple[PlannedIsland, ...]
    bridges: tuple[PlannedBridge, ...] = ()
    way: str = "ssh"  # or another engine's: how hosts other than this machine are entered
    verify_bridge: bool = False

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        plan: Plan | None = None,
        *,
        bridges: Sequence[PlannedBridge] | None = None,
        way: str = "ssh",
        verify_bridge: bool = False,
    ) -> Launch:
        """A plan's ranks where it says, or on this machine's devices that stand for them; else all of the cluster's."""
        if plan is None:
            seats = tuple(Seat(rank, m.host, m.device) for rank, m in enumerate(_members(cluster)))
            islands = planned_islands(cluster)
        else:
            seats, islands = tuple(Seat(r.rank, r.host, r.device) for r in plan.ranks), plan.islands
            bridges = plan.bridges if bridges is None else bridges
            if cluster.source == "emulated" and any(s.host not in cluster.host_by_name for s in seats):
                seats = _stand_ins(plan, cluster)
        return cls(cluster, seats, islands, tuple(bridges or ()), way, verify_bridge)

    @cached_property
    def hosts(self) -> list[Host]:
        return [self.cluster.host_by_name[name] for name in self.seats_of]

    @cached_property
    def seats_of(self) -> Mapping[str, Sequence[Seat]]:
        """Those of each host, in the order in which the seats name the hosts."""
        found: dict[str, list[Seat]] = {}
        for seat in self.seats:
            found.setdefault(seat.host, []).append(seat)
        return found

    @property
    def accesses(self) -> dict[str, Access]:
        return {host.name: host.access or Access() for host in self.hosts}

    @property
    def here(self) -> bool:
        """Whether this machine is all there is: no SSH, no shipping."""
        here = all(h.access is None or h.access.local for h in self.hosts) and len(self.hosts) == 1
        return here and (self.way in ("ssh", "local") or self.cluster.source == "emulated")

    def vendor_of(self, seat: Seat) -> str:
        return self.cluster.device(Member(seat.host, seat.device)).vendor

    def pythons(self, host: Host) -> Mapping[str, str]:
        """Per vendor of a host's ranks the Python that is named for it."""
        named = host.access.pythons if host.access else {}
        vendors = dict.fromkeys(map(self.vendor_of, self.seats_of[host.name]))
        return {vendor: named[vendor] for vendor in vendors if vendor in named}

    @property
    def device_type(self) -> str:
        """What torch calls the devices that the ranks compute on."""
        return device_type(self.cluster, [i.vendor for i in self.islands])

    @property
    def placement(self) -> Placement:
        """What ranks are told of islands and bridges."""
        used = [i for i in self.islands if i.ranks]
        islands = tuple(PlacedIsland(i.name, i.vendor, self._torch_backend(i.vendor), i.ranks) for i in used)
        bridges = tuple(PlacedBridge(b.islands, b.transport, b.forced) for b in self.bridges)
        return Placement(islands, bridges, tuple(s.host for s in self.seats), self.verify_bridge)

    def _torch_backend(self, vendor: str) -> str:
        return native_of(library=self.cluster.library_of(vendor)).torch_backend

    def ports(self, host: Host) -> Sequence[WatchedPort]:
        """The network ports of a host that its agent watches."""
        seats = self.seats_of[host.name]
        return ports_of(
            self.cluster, host, seats, rails=chain.from_iterable(self._rails.get(s.rank, ()) for s in seats)
        )

    @cached_property
    def _rails(self) -> Mapping[int, Sequence[str]]:
        """Per rank the ports at its ends of the bridges' rails."""
        found: dict[int, list[str]] = {}
        for rail in chain.from_iterable(b.rails for b in self.bridges):
            found.setdefault(rail.from_rank, []).append(rail.from_nic)
            found.setdefault(rail.to_rank, []).append(rail.to_nic)
        return found

    def settings(self) -> Mapping[str, Sequence[Setting]]:
        """Per host what its facts and its owner say about its ranks' environment. Raises ConfigError."""
        seats = self.seats_of
        return {h.name: host_settings(self.cluster, h, seats[h.name], environment=os.environ) for h in self.hosts}


def _members(cluster: Cluster) -> Iterator[Member]:
    return chain.from_iterable(island.members for island in cluster.islands)


def _stand_ins(plan: Plan, cluster: Cluster) -> tuple[Seat, ...]:
    """The plan names hosts that are not here: their ranks sit on this machine's devices, island by island."""
    ranks = chain.from_iterable(island.ranks for island in plan.islands)
    seats = (Seat(r, m.host, m.device) for r, m in zip(ranks, _members(cluster), strict=True))
    return tuple(sorted(seats, key=lambda seat: seat.rank))


def say_unverified(launch: Launch, console: Console) -> None:
    """Where --verify-bridge has nothing to verify: the native library checks what it carries in its own way."""
    joined = [" and ".join(b.islands) for b in launch.bridges if b.transport == NATIVE]
    if launch.verify_bridge and joined:
        console.warn(f"--verify-bridge checks nothing between {', '.join(joined)}: their own library joins them")


def start_agents_on(
    launch: Launch,
    place: OnFile,
    *,
    paths: Sequence[str] = (),
    shipments: Sequence[Shipment] = (),
    program: FolderFiles | None = None,
    console: Console,
) -> Agents:
    """Agents on all hosts of the launch. `paths` must be readable there, `shipments` are sent where they are lacking,
    `program` is what to take along.

    Raises one HetctlError that names every host that cannot take part.
    """
    folder = place.folder
    if launch.here and not launch.pythons(launch.hosts[0]):  # no SSH, nothing shipped
        name = launch.hosts[0].name
        place.enlist({name: Access()}, way=launch.way)
        return start_agent_here(name, folder, code_root())
    if launch.way == "local" and not launch.here:
        raise ConfigError(f"--launcher local starts ranks here only, the cluster has {launch.hosts[0].name} and others")
    entrance = Entrance(launch.way)
    code, taken_along = code_bundle(code_root() / "hetctl"), folder_bundle(program) if program else None
    place.enlist(launch.accesses, way=launch.way)
    try:
        entrance.check(launch.hosts, folder.identity, console.say)
        targets = [
            replace(target_of(host, entrance, alone=len(launch.hosts) == 1), pythons=launch.pythons(host))
            for host in launch.hosts
        ]
        console.say(f"entering {count_of(len(targets), 'host')}")
        request = AgentRequest(folder, LEASE_S, code, taken_along, tuple(paths), ship(targets, shipments, console))
        refused = lambda name, error: console.warn(f"{name} cannot take part: {error}")  # noqa: E731
        agents = start_agents(targets, request, on_refusal=refused)
    except BaseException:
        entrance.close()
        raise
    agents.on_close = entrance.close
    return agents


@contextmanager
def given_up(agents: Agents) -> Iterator[None]:
    """What goes wrong in this block, before any rank starts, leaves no agent."""
    try:
        yield
    except BaseException:
        agents.close()
        raise


@contextmanager
def held_hosts(launch: Launch, folder: RunFolder, console: Console) -> Iterator[None]:
    """What an engine makes for a run's hosts lasts until the end of the block, which TERM ends as Ctrl-C does.

    Raises ConfigError where another process supervises the run.
    """
    release = None if launch.here else RELEASES.get(launch.way)
    if release is None:
        yield
        return
    refuse_supervised(folder.identity, folder.path)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # hosts are waited for: `hetctl stop`
    try:
        yield
    finally:
        try:
            release(folder.identity, launch.accesses)
        except HetctlError as error:
            console.warn(f"what holds the hosts of {folder.name} is left, and ends by itself: {error.message}")
        signal.signal(signal.SIGTERM, before)


def code_root() -> Path:
    """The folder that holds the `hetctl` package: this very code."""
    return Path(__file__).absolute().parents[3]


def target_of(host: Host, entrance: Entrance, *, alone: bool = False) -> TargetHost:
    """A host of a cluster as agents are started on it; ranks of one that is `alone` may talk over loopback.

    Raises ConfigError where the cluster does not say how.
    """
    if host.access is None:
        raise ConfigError(
            f"the cluster file does not say how '{host.name}' is entered", hint="make it with `hetctl discover`"
        )
    opener = lambda deadline: entrance.open(host, deadline)  # noqa: E731
    if alone and not host.data_address:
        return TargetHost(host.name, host.access, opener, "127.0.0.1", "lo")
    interface = interface_of(host)
    address, interface = entrance.address(host, interface) or (host.data_address, interface)
    if not address:
        raise ConfigError(
            f"the cluster file gives '{host.name}' no data_address, where its ranks would talk",
            hint="name one in the inventory, then run `hetctl discover` again",
        )
    return TargetHost(host.name, host.access, opener, address, interface)
