"""The cluster as frozen values: hosts, devices, NICs, networks, islands and what joins the islands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.fabrics import NetworkKind as NetworkKind
from hetctl.comm.contract.files import read_yaml
from hetctl.comm.contract.kept_files import write_stamped
from hetctl.comm.contract.natives import HOST, NATIVES, NativeName
from hetctl.comm.contract.pod_settings import PodSettings
from hetctl.comm.contract.transports import TransportKind as TransportKind
from hetctl.comm.contract.values import T, decode, encode


@dataclass(frozen=True)
class Access:
    """How a host is entered, with which Python and environment. `address` None is this machine, no SSH.

    What is None is left to `~/.ssh/config` and its defaults.
    """

    address: str | None = None  # an alias of ~/.ssh/config, a name, or an IP address
    user: str | None = None  # to log in as
    port: int | None = None  # of the SSH server
    identity_file: str | None = None  # a private key
    proxy_jump: str | None = None  # [user@]host[:port], several joined by commas
    python: str = "python3"  # the one that has torch, a path or a command
    pythons: Mapping[str, str] = field(default_factory=dict)  # vendor -> the one that has its torch, where they differ
    prefix: tuple[str, ...] = ()  # enters a container there: docker exec -i NAME
    env: Mapping[str, str | None] = field(default_factory=dict)  # None: the value of whoever launches
    exclude_nics: tuple[str, ...] = ()  # interfaces that nothing of a run may take
    gpus: tuple[int, ...] | None = None  # the devices to use, None for all
    slurm: tuple[str, ...] = ()  # what sbatch is told of its component: --partition=amd
    kubernetes: PodSettings | None = None  # of the pod that stands for it
    way: str | None = (
        None  # the engine that enters it, as `discover --from` found it there: ray, kubernetes; None: SSH, or srun
    )

    @property
    def local(self) -> bool:
        """Whether this machine is meant, without SSH."""
        return self.address is None


SCHEMA_VERSION = 1
LONGEST_LATENCY_S = 3600.0


def plausible(rate: float) -> bool:
    """Whether any port or link has so many bytes per second, or a device such a share of its class's speed."""
    return 1e-9 <= rate <= 1e18


@dataclass(frozen=True)
class Nic:
    """One network port. `network` names the entry of Cluster.networks it reaches, None when unknown."""

    name: str  # network interface, e.g. ens1f0
    kind: NetworkKind = "ethernet"  # how it is linked, as its network
    rate_bytes_per_s: float | None = None  # of the link, one way
    network: str | None = None  # the name of the network that it reaches
    address: str | None = None  # its IP address
    rdma_device: str | None = None  # e.g. mlx5_0
    pci: str | None = None  # its PCI address
    numa_node: int | None = None  # of the host, that it is attached to


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process slot) of a host."""

    index: int  # unique on its host
    vendor: str  # nvidia, amd, ...; cpu
    device_class: str  # what it is: a row of the hardware table, or of `classes`
    memory_bytes: int | None = None  # that it has
    nics: tuple[str, ...] = ()  # nearest first
    uuid: str | None = None  # as its vendor's tool says it
    pci: str | None = None  # its PCI address
    numa_node: int | None = None  # of the host, that it is attached to
    speed: float = 1.0  # emulation: the share of this machine's speed, (0, 1]
    ordinal: int | None = None  # as its vendor's runtime counts it, where that is not `index`
    used_bytes: int | None = None  # of its memory, by others (a display) when discovered; None: little, or unknown

    @property
    def room_bytes(self) -> int | None:
        """Its memory without what others use."""
        return None if self.memory_bytes is None else max(0, self.memory_bytes - (self.used_bytes or 0))


@dataclass(frozen=True)
class Host:
    """One machine: how it is reached, what it holds, and everything its probe read (`facts`)."""

    name: str  # unique in the cluster
    access: Access | None = None  # how it is entered; None: emulated or described
    data_address: str | None = None  # where ranks talk
    status: str = "ok"  # ok, or the outcome of the failed discovery
    reason: str | None = None  # why its discovery failed
    devices: tuple[Device, ...] = ()
    nics: tuple[Nic, ...] = ()
    memory_bytes: int | None = None  # of the host itself
    facts: Mapping[str, Any] = field(default_factory=dict)  # what its probe read: the doctor judges it


@dataclass(frozen=True)
class Network:
    """What a set of NICs all reach: one InfiniBand subnet, one RoCE, Slingshot, EFA or Ethernet network."""

    name: str  # unique in the cluster
    kind: NetworkKind  # how its ports are linked
    hosts: tuple[str, ...]  # that have a port in it
    reason: str = ""  # why these ports are taken for one network


@dataclass(frozen=True)
class Member:
    """One device of an island."""

    host: str  # a name of `hosts`
    device: int  # an index on that host


@dataclass(frozen=True)
class Island:
    """Devices that can share one native communicator: one vendor and a fabric all of them reach."""

    name: str  # unique in the cluster
    vendor: str  # of all its devices
    fabric: str  # 'host' within one machine, else a Network name
    members: tuple[Member, ...]

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts it has devices on."""
        return tuple(dict.fromkeys(m.host for m in self.members))


@dataclass(frozen=True)
class TransportOption:
    """One way for two islands to talk, whether it is usable, and why (or why not)."""

    kind: TransportKind  # what carries the bytes
    usable: bool  # whether it can be taken
    reason: str  # why, or why not
    rate_bytes_per_s: float | None = None  # of all rails together
    latency_s: float | None = None  # one way
    measured: bool = False  # whether rate and latency were measured; else they follow from the ports
    networks: tuple[str, ...] = ()  # it crosses these; none named: all that every host of both islands reaches


@dataclass(frozen=True)
class IslandLink:
    """Everything known about how two islands (by name) can talk, best transport first."""

    islands: tuple[str, str]  # their names
    transports: tuple[TransportOption, ...]


def native_way(a: Island, b: Island, tcp: TransportOption) -> TransportOption:
    """The way of islands of one vendor that is no bridge: their own library, over sockets where TCP reaches."""
    if a.vendor != b.vendor:
        return TransportOption("native", False, f"no library speaks {a.vendor} and {b.vendor}")
    if not tcp.usable:
        return TransportOption("native", False, tcp.reason)
    why = f"both are {a.vendor}: its own library, over sockets between hosts, on the ports that TCP takes"
    return TransportOption("native", True, why, tcp.rate_bytes_per_s, tcp.latency_s, tcp.measured, tcp.networks)


@dataclass(frozen=True)
class Measured:
    """One rail between two hosts as it was measured (or why it could not be), by which tool."""

    hosts: tuple[str, str]  # the two ends
    nics: tuple[str, str]  # of each end
    tool: str  # tcp: our own sender; else the native tool's name
    latency_s: float | None = None  # one way
    rate_bytes_per_s: float | None = None  # of the slower direction
    problem: str | None = None  # why there is no figure


@dataclass(frozen=True)
class Cluster:
    """All facts together. `source` says whether it was discovered or is an emulation."""

    hosts: tuple[Host, ...]
    islands: tuple[Island, ...]
    networks: tuple[Network, ...] = ()
    links: tuple[IslandLink, ...] = ()
    measured: tuple[Measured, ...] = ()
    source: Literal["discovered", "emulated", "described"] = "discovered"  # `described`: made of a SPEC, need not exist
    runs: NativeName | None = None  # emulation: the native library this machine really has
    runs_class: str | None = None  # emulation: what its devices really are, whatever they are labelled
    classes: tuple[
        DeviceClass, ...
    ] = ()  # what a person said of device classes, or was estimated, in place of the hardware table
    schema_version: int = SCHEMA_VERSION  # of this file's form

    @cached_property
    def digest(self) -> str:
        """SHA-256 over what plans depend on: not raw facts (free memory, counters), nor how hosts are entered."""
        bare = replace(self, hosts=tuple(replace(h, facts={}, access=None) for h in self.hosts))
        plain = encode(bare)
        optional = [(plain, "classes"), *((host, "memory_bytes") for host in plain["hosts"])]
        optional += [(device, "used_bytes") for host in plain["hosts"] for device in host["devices"]]
        optional += [(way, "networks") for link in plain["links"] for way in link["transports"]]
        for where, key in optional:
            if not where[key]:
                del where[key]  # older files do not have it, and plans made for them hold
        text = json.dumps(plain, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def shares_devices(self) -> bool:
        """Whether several labels of an emulation stand on one device, so that no communicator spans all of them."""
        seats = [(m.host, self.device(m)) for island in self.islands if island.vendor != HOST for m in island.members]
        real = [(host, device.index if device.ordinal is None else device.ordinal) for host, device in seats]
        return self.source == "emulated" and len(set(real)) < len(real)

    def library_of(self, vendor: str) -> NativeName:
        """What really carries tensors inside a vendor's islands: an emulation's labels stand on what there is."""
        return self.runs if self.runs is not None and vendor != HOST else NATIVES[vendor].library

    @cached_property
    def host_by_name(self) -> dict[str, Host]:
        return {h.name: h for h in self.hosts}

    def device(self, member: Member) -> Device:
        """The device a member stands for. Raises ConfigError when there is none."""
        if device := self._devices.get((member.host, member.device)):
            return device
        raise ConfigError(f"the cluster has no device {member.device} on host '{member.host}'")

    @cached_property
    def _devices(self) -> dict[tuple[str, int], Device]:
        return {(host.name, device.index): device for host in self.hosts for device in host.devices}

    def link(self, a: str, b: str) -> IslandLink | None:
        """What is known about the way between two islands, in either order."""
        return self._links.get(frozenset((a, b)))

    @cached_property
    def _links(self) -> dict[frozenset[str], IslandLink]:
        return {frozenset(link.islands): link for link in self.links}

    def _check_figures(self, where: str) -> None:
        """Raise ConfigError for a link or device without speed, or a latency that is no time: unknown is null."""
        ways = [(" and ".join(link.islands), way) for link in self.links for way in link.transports]
        rates = [(f"{h.name}: {n.name}", n.rate_bytes_per_s) for h in self.hosts for n in h.nics]
        rates += [(f"{h.name}: device {d.index}", d.speed) for h in self.hosts for d in h.devices]
        rates += [(what, way.rate_bytes_per_s) for what, way in ways]
        wrong = [f"rate of {what}" for what, rate in rates if rate is not None and not plausible(rate)]
        wrong += [f"latency of {what}" for what, way in ways if not 0 <= (way.latency_s or 0.0) <= LONGEST_LATENCY_S]
        if wrong:
            why = "is not above zero, or of no real thing"
            raise ConfigError(f"{where}: the {wrong[0]} {why}", hint="write null where it is unknown")

    def validate(self, *, where: str) -> None:
        """Raise ConfigError unless names are unique and every reference resolves."""
        for what, names in (
            ("host", [h.name for h in self.hosts]),
            ("island", [i.name for i in self.islands]),
        ):
            twice = {n for n in names if names.count(n) > 1} if len(set(names)) != len(names) else set()
            if twice:
                raise ConfigError(f"{where}: the {what} '{min(twice)}' is listed twice")
        self._check_figures(where)
        seen: set[Member] = set()
        for island in self.islands:
            for member in island.members:
                if self.device(member).vendor != island.vendor:
                    raise ConfigError(f"{where}: island '{island.name}' mixes vendors")
                if member in seen:
                    raise ConfigError(f"{where}: device {member.device} of '{member.host}' is in two islands")
                seen.add(member)


def load_cluster(path: Path) -> Cluster:
    """A cluster.yaml, validated. Raises ConfigError."""
    cluster = read_versioned(path, Cluster, what="cluster file")
    cluster.validate(where=path.name)
    return cluster


_HEADER = "Written by `hetctl discover`: what this cluster is."


def save_cluster(path: Path, cluster: Cluster, *, keep: bool = False) -> Path | None:
    """Write cluster.yaml atomically; where the old one is kept, if that is asked for and it differs."""
    return write_stamped(path, cluster, header=_HEADER, keep=keep)


def read_versioned(path: Path, cls: type[T], *, what: str) -> T:
    """The value in a YAML file of the schema that this hetctl reads. Raises ConfigError."""
    data = read_yaml(path, what=what)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected keys and values")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        found = "has no schema_version" if version is None else f"has schema_version {version!r}"
        raise ConfigError(f"{path} {found}; this hetctl reads {SCHEMA_VERSION}")
    return decode(cls, data, where=path.name)
