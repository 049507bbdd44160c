"""Emulation: a SPEC such as `h200:2,mi325x:2@0.6` as a cluster, described (not owned) or labelled on this machine.

Islands are separated by `,`, the classes of one island joined by `+`, each `CLASS:COUNT[@SPEED][~MEMORY]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetctl.comm.contract.cluster import (
    Cluster,
    Device,
    Host,
    Island,
    IslandLink,
    Member,
    Network,
    Nic,
    TransportOption,
    native_way,
)
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import NativeName
from hetctl.comm.contract.units import parse_bytes

GPUS_PER_HOST = 8
_PART = re.compile(r"(?P<name>[^:@~]+):(?P<count>[^@~]*)(?:@(?P<speed>[^~]*))?(?:~(?P<memory>.*))?")
_SHAPE = "write CLASS:COUNT[@SPEED][~MEMORY], for example h200:2,mi325x:2@0.6"


@dataclass(frozen=True)
class SpecPart:
    """`count` devices of one class; `speed` a share of the real one's, `memory_bytes` a cap."""

    device_class: str
    count: int
    speed: float = 1.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class SpecIsland:
    """One island of a SPEC: one vendor, one or more classes."""

    vendor: str
    parts: tuple[SpecPart, ...]

    @property
    def count(self) -> int:
        return sum(p.count for p in self.parts)


@dataclass(frozen=True)
class Machine:
    """What `train --emulate` labels: this machine's devices, GPUs or CPU processes."""

    host: str
    native: NativeName
    memory_bytes: tuple[int | None, ...]  # per device; CPU: per process slot
    device_class: str | None = None  # what its devices really are, whatever they are labelled
    gpus: int | None = None  # real ones that the devices take turns on, where there are fewer than devices


def parse_spec(text: str, classes: Mapping[str, DeviceClass]) -> tuple[SpecIsland, ...]:
    """The islands of a SPEC. Raises ConfigError naming what is wrong and the nearest known class."""
    islands = []
    for island_text in text.split(","):
        parts = tuple(_parse_part(part.strip(), text, classes) for part in island_text.split("+"))
        vendors = sorted({classes[p.device_class].vendor for p in parts})
        if len(vendors) > 1:
            raise ConfigError(
                f"'{island_text.strip()}' puts {' and '.join(vendors)} into one island",
                hint="two vendors never share a native communicator: separate them with ','",
            )
        islands.append(SpecIsland(vendors[0], parts))
    return tuple(islands)


def _peer_copy(native: NativeName) -> tuple[bool, str]:
    """Whether `direct` may be asked for between labels of one machine, and what it is there. Never taken unasked."""
    if native == "gloo":
        return False, "there is no device here whose memory could be registered"
    return True, "no RDMA: the driver's peer copy between devices of one host and one vendor, over an engine"


def label_machine(spec: Sequence[SpecIsland], machine: Machine) -> Cluster:
    """This machine's devices, labelled in order as the SPEC's islands. No native group crosses a label unasked."""
    wanted = sum(island.count for island in spec)
    if wanted > len(machine.memory_bytes):
        raise ConfigError(f"the SPEC asks for {wanted} devices, this machine offers {len(machine.memory_bytes)}")
    devices: list[Device] = []
    islands: list[Island] = []
    nic = Nic("lo", "host", network="host", address="127.0.0.1")
    for name, island in zip(_names(spec), spec, strict=True):
        first = len(devices)
        for part in island.parts:
            for _ in range(part.count):
                index = len(devices)
                own = machine.memory_bytes[index]
                cap = min(filter(None, (own, part.memory_bytes)), default=None)
                real = index % machine.gpus if machine.gpus else None  # an island's are consecutive: each on its own
                known = (island.vendor, part.device_class, cap, (nic.name,))
                devices.append(Device(index, *known, speed=part.speed, ordinal=real))
        members = tuple(Member(machine.host, i) for i in range(first, len(devices)))
        islands.append(Island(name, island.vendor, "host", members))
    host = Host(machine.host, data_address="127.0.0.1", devices=tuple(devices), nics=(nic,))
    tcp = TransportOption("tcp", True, "loopback TCP on this machine: what a network would see")
    ways = (
        TransportOption("shm", True, "both islands are on this machine: memory that both processes map"),
        tcp,
        TransportOption("rdma", False, "emulated islands have no RDMA NIC between them"),
        TransportOption("direct", *_peer_copy(machine.native)),
    )
    shared = TransportOption("native", False, "islands share GPUs here, of which a communicator takes each once")
    links = tuple(
        IslandLink((a.name, b.name), (*ways, shared if machine.gpus else native_way(a, b, tcp)))
        for a, b in combinations(islands, 2)
    )
    network = Network("host", "host", (host.name,), "one machine")
    return Cluster(
        (host,),
        tuple(islands),
        (network,),
        links,
        source="emulated",
        runs=machine.native,
        runs_class=machine.device_class,
    )


def describe_cluster(spec: Sequence[SpecIsland], classes: Mapping[str, DeviceClass]) -> Cluster:
    """A cluster nobody here owns: table values, 8 GPUs a host, one default NIC per GPU, one RoCE network."""
    hosts: list[Host] = []
    islands: list[Island] = []
    rates: dict[str, float] = {}
    for name, island in zip(_names(spec), spec, strict=True):
        flat = [part for part in island.parts for _ in range(part.count)]
        members: list[Member] = []
        for start in range(0, len(flat), GPUS_PER_HOST):
            host = _described_host(f"{name}-{start // GPUS_PER_HOST}", flat[start : start + GPUS_PER_HOST], classes)
            hosts.append(host)
            members += [Member(host.name, d.index) for d in host.devices]
        rates[name] = sum(n.rate_bytes_per_s or 0 for h in hosts if h.name.startswith(name + "-") for n in h.nics)
        islands.append(Island(name, island.vendor, "roce0", tuple(members)))
    network = Network("roce0", "roce", tuple(h.name for h in hosts), "assumed: one RoCE network for all")
    links = []
    for a, b in combinations(islands, 2):
        rate = min(rates[a.name], rates[b.name])
        tcp = TransportOption("tcp", True, "assumed: TCP over the default NICs", rate)
        ways = (
            TransportOption("rdma", True, "assumed: RDMA from pinned host memory over the default NICs", rate),
            tcp,
            TransportOption("direct", False, "not proved: direct needs both ends to have registered device memory"),
            TransportOption("shm", False, "described islands share no host"),
            native_way(a, b, tcp),
        )
        links.append(IslandLink((a.name, b.name), ways))
    return Cluster(tuple(hosts), tuple(islands), (network,), tuple(links), source="described")


def _described_host(name: str, parts: Sequence[SpecPart], classes: Mapping[str, DeviceClass]) -> Host:
    devices, nics = [], []
    for index, part in enumerate(parts):
        row = classes[part.device_class]
        nic = Nic(f"nic{index}", "roce", row.nic_bytes_per_s, "roce0")
        memory = min(row.memory_bytes, part.memory_bytes or row.memory_bytes)
        nics.append(nic)
        devices.append(Device(index, row.vendor, part.device_class, memory, (nic.name,), speed=part.speed))
    return Host(name, devices=tuple(devices), nics=tuple(nics))


def _parse_part(part: str, text: str, classes: Mapping[str, DeviceClass]) -> SpecPart:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"'{part}' in the SPEC '{text}' is not a class and a count", hint=_SHAPE)
    name = classes[match["name"].strip().lower()].name
    count = _whole(match["count"], part)
    speed = 1.0 if match["speed"] is None else _speed(match["speed"], part)
    memory = None if match["memory"] is None else parse_bytes(match["memory"])
    return SpecPart(name, count, speed, memory)


def _whole(text: str, part: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"'{part}' needs a count of at least 1, found '{text}'", hint=_SHAPE)
    if int(text) > 1_000_000:
        raise ConfigError(f"'{part}' asks for more devices than any cluster has", hint=_SHAPE)
    return int(text)


def _speed(text: str, part: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ConfigError(
            f"'{part}': the speed must be in (0, 1], found '{text}'", hint="@0.6 is 60 % of the real speed"
        )
    return value


def _names(spec: Sequence[SpecIsland]) -> list[str]:
    """Island names: their classes, numbered from the second of the same name on."""
    names: list[str] = []
    for island in spec:
        base = "+".join(dict.fromkeys(p.device_class for p in island.parts))
        number = sum(n == base or n.startswith(base + "#") for n in names)
        names.append(f"{base}#{number + 1}" if number else base)
    return names
