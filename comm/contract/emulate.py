"""Emulation: a SPEC such as `h200:2,mi325x:2@0.6` as a cluster, described (not owned) or labelled on this machine.

Islands are separated by `,`, the classes of one island joined by `+`, each `CLASS:COUNT[@SPEED][~MEMORY]`. A described
cluster may also say hosts (COUNT as HOSTSxGPUS), the fabric of an island (`/ib400`, `/roce200x2`) and, after `;`, what
joins islands (`;25GbE`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from hetctl.comm.contract.cluster import (
    Cluster,
    Device,
    Host,
    Island,
    IslandLink,
    Member,
    Network,
    NetworkKind,
    Nic,
    TransportOption,
    native_way,
)
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.fabrics import NETWORKS
from hetctl.comm.contract.natives import HOST, NativeName
from hetctl.comm.contract.units import parse_memory

GPUS_PER_HOST = 8
HOST_MEMORY = 2  # of a described host, over its devices': what vendors' reference hosts have
_PART = re.compile(r"(?P<name>[^:@~]+):(?P<count>[^@~]*)(?:@(?P<speed>[^~]*))?(?:~(?P<memory>.*))?")
_SHAPE = "write CLASS:COUNT[@SPEED][~MEMORY][/FABRIC], for example h200:2,mi325x:2@0.6 or h200:2x8/ib400"
_FABRIC = re.compile(
    r"(?:(?P<kind>ib|roce|cxi|efa|eth)(?P<rate>\d+)|(?P<ethernet>\d+(?:\.5)?)gbe)(?:x(?P<ports>[1-9]\d?))?"
)
_KINDS: dict[str, NetworkKind] = {"ib": "infiniband", "roce": "roce", "cxi": "cxi", "efa": "efa", "eth": "ethernet"}


@dataclass(frozen=True)
class SpecPart:
    """`count` devices of one class; `speed` a share of the real one's, `memory_bytes` a cap."""

    device_class: str
    count: int
    speed: float = 1.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Fabric:
    """A network as a SPEC says it: `ib400`, `roce200x2`, `25GbE`."""

    kind: NetworkKind
    bytes_per_s: float  # of each port
    ports: int | None = None  # per host; None: Ethernet one, otherwise one a GPU

    def nics(self, name: str, network: str, gpus: int) -> tuple[Nic, ...]:
        """The ports of a host of so many GPUs on this network."""
        count = self.ports or (1 if self.kind == "ethernet" else gpus)
        return tuple(Nic(f"{name}{k}", self.kind, self.bytes_per_s, network) for k in range(count))


@dataclass(frozen=True)
class SpecIsland:
    """One island of a SPEC: one vendor, one or more classes; and, of a described one, its hosts and networks."""

    vendor: str
    parts: tuple[SpecPart, ...]
    per_host: int = GPUS_PER_HOST
    fabric: Fabric | None = None  # None: the default NICs, on one network with the others
    outward: Fabric | None = None  # what joins it to other islands, where that is not its fabric

    @property
    def said(self) -> bool:
        """Whether more is said than which devices: that describes a cluster, and labels nothing."""
        return bool(self.fabric or self.outward or self.per_host != GPUS_PER_HOST)

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
    host_memory_bytes: int | None = None  # where devices have memory of their own
    gpus: int | None = None  # real ones that the devices take turns on, where there are fewer than devices
    classes: tuple[DeviceClass, ...] = ()  # that the hardware table lacks: an estimate of that class


def parse_spec(text: str, classes: Mapping[str, DeviceClass]) -> tuple[SpecIsland, ...]:
    """The islands of a SPEC. Raises ConfigError naming what is wrong and the nearest known class."""
    words, _, outward = text.partition(";")
    joint = parse_fabric(outward) if outward.strip() else None
    islands = []
    for island_text in words.split(","):
        devices, slash, fabric = island_text.rpartition("/")
        if ":" not in devices:  # a slash in a class's name: `mi300x/cpx:4`
            devices, slash, fabric = island_text, "", ""
        found = [_parse_part(part.strip(), text, classes) for part in devices.split("+")]
        parts, hosts = tuple(part for part, _ in found), {per_host for _, per_host in found if per_host}
        vendors = sorted({classes[p.device_class].vendor for p in parts})
        if len(vendors) > 1:
            raise ConfigError(
                f"'{island_text.strip()}' puts {' and '.join(vendors)} into one island",
                hint="two vendors never share a native communicator: separate them with ','",
            )
        if len(hosts) > 1:
            raise ConfigError(f"'{island_text.strip()}' has hosts of {' and of '.join(map(str, sorted(hosts)))} GPUs")
        inside = parse_fabric(fabric) if slash else None
        islands.append(SpecIsland(vendors[0], parts, next(iter(hosts), GPUS_PER_HOST), inside, joint))
    return tuple(islands)


def parse_fabric(text: str) -> Fabric:
    """`ib400`, `roce200x2` (two ports a host), `25GbE`, `2.5GbE`; rates in Gbit/s. Raises ConfigError."""
    match = _FABRIC.fullmatch(text.strip().lower())
    gigabits = float(match["rate"] or match["ethernet"]) if match else 0
    if match is None or not 0 < gigabits <= 100_000:
        raise ConfigError(
            f"'{text.strip()}' is not a network",
            hint="write ib400, roce200, efa400, cxi200 or 25GbE; ports a host: ib400x8",
        )
    return Fabric(_KINDS[match["kind"] or "eth"], gigabits / 8 * 1e9, int(match["ports"]) if match["ports"] else None)


def parse_links(texts: Sequence[str], islands: Sequence[str]) -> dict[frozenset[str], Fabric]:
    """`A-B=25GbE` for pairs of islands. Raises ConfigError for islands that are not there."""
    found: dict[frozenset[str], Fabric] = {}
    for text in texts:
        names, equals, fabric = text.partition("=")
        pair = next((p for p in combinations(islands, 2) if names in ("-".join(p), "-".join(p[::-1]))), None)
        if not equals or pair is None:
            between = " or ".join("-".join(p) for p in combinations(islands, 2)) or "nothing: there is one island"
            raise ConfigError(f"--link {text} is not A-B=NETWORK", hint=f"islands here: {between}")
        found[frozenset(pair)] = parse_fabric(fabric)
    return found


def _peer_copy(native: NativeName, *islands: Island) -> TransportOption:
    """Whether `direct` may be asked for between labels of one machine, and what it is there. Never taken unasked."""
    if native == "gloo" or any(island.vendor == HOST for island in islands):
        return TransportOption("direct", False, "there is no device here whose memory could be registered")
    why = "no RDMA: the driver's peer copy between devices of one host and one vendor, over an engine"
    return TransportOption("direct", True, why)


def label_machine(spec: Sequence[SpecIsland], machine: Machine) -> Cluster:
    """This machine's devices, labelled in order as the SPEC's islands. No native group crosses a label unasked."""
    beside = machine.native != "gloo"  # islands of CPUs stand beside devices, and take none
    wanted = sum(island.count for island in spec if not beside or island.vendor != HOST)
    if wanted > len(machine.memory_bytes):
        raise ConfigError(f"the SPEC asks for {wanted} devices, this machine offers {len(machine.memory_bytes)}")
    every = sum(island.count for island in spec)
    # how many devices labels count among, where a label's own number is not its device's
    among = machine.gpus or (wanted if wanted < every else None)
    slot = machine.host_memory_bytes // every if machine.host_memory_bytes else None  # of a CPU process beside devices
    devices: list[Device] = []
    islands: list[Island] = []
    nic, taken = Nic("lo", "host", network="host", address="127.0.0.1"), 0
    for name, island in zip(_names(spec), spec, strict=True):
        first = len(devices)
        for part in island.parts:
            for _ in range(part.count):
                index, on_host = len(devices), beside and island.vendor == HOST
                own = slot if on_host else machine.memory_bytes[taken]
                cap = min(filter(None, (own, part.memory_bytes)), default=None)
                real = taken % among if among and not on_host else None  # an island's are consecutive: each on its own
                taken += not on_host
                known = (island.vendor, part.device_class, cap, (nic.name,))
                devices.append(Device(index, *known, speed=part.speed, ordinal=real))
        members = tuple(Member(machine.host, i) for i in range(first, len(devices)))
        islands.append(Island(name, island.vendor, "host", members))
    own = machine.host_memory_bytes
    host = Host(machine.host, data_address="127.0.0.1", devices=tuple(devices), nics=(nic,), memory_bytes=own)
    tcp = TransportOption("tcp", True, "loopback TCP on this machine: what a network would see")
    ways = (
        TransportOption("shm", True, "both islands are on this machine: memory that both processes map"),
        tcp,
        TransportOption("rdma", False, "emulated islands have no RDMA NIC between them"),
    )
    shared = TransportOption("native", False, "islands share GPUs here, of which a communicator takes each once")
    links = tuple(
        IslandLink(
            (a.name, b.name),
            (*ways, _peer_copy(machine.native, a, b), shared if machine.gpus else native_way(a, b, tcp)),
        )
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
        classes=machine.classes,
    )


def describe_cluster(
    spec: Sequence[SpecIsland], classes: Mapping[str, DeviceClass], links: Sequence[str] = ()
) -> Cluster:
    """A cluster nobody here owns: as the SPEC says it, otherwise the table's values, 8 GPUs a host, one default NIC per
    GPU, one RoCE network. `links` are `A-B=25GbE`, networks between two islands alone. Raises ConfigError."""
    names = _names(spec)
    fabrics = parse_links(links, names)
    pairs = {pair: "-".join(sorted(pair)) for pair in fabrics}
    hosts: list[Host] = []
    islands: list[Island] = []
    for name, island in zip(names, spec, strict=True):
        own = network_of(island)
        outward = [(fabrics[pair], network) for pair, network in pairs.items() if name in pair]
        outward += [(island.outward, "outward")] if island.outward else []
        flat = [part for part in island.parts for _ in range(part.count)]
        members: list[Member] = []
        for start in range(0, len(flat), island.per_host):
            there = flat[start : start + island.per_host]
            host = _described_host(f"{name}-{start // island.per_host}", there, classes, island.fabric, own, outward)
            hosts.append(host)
            members += [Member(host.name, d.index) for d in host.devices]
        islands.append(Island(name, island.vendor, own, tuple(members)))
    networks = _networks(hosts)
    kinds = {n.name: n.kind for n in networks}
    made = [
        _described_link(a, b, hosts, kinds, pairs.get(frozenset((a.name, b.name)))) for a, b in combinations(islands, 2)
    ]
    return Cluster(tuple(hosts), tuple(islands), networks, tuple(made), source="described")


def network_of(island: SpecIsland) -> str:
    """The network of an island's own fabric: islands that say the same are on one."""
    fabric = island.fabric
    return f"{fabric.kind}-{fabric.bytes_per_s * 8 / 1e9:.0f}" if fabric else "roce0"


def _networks(hosts: Sequence[Host]) -> tuple[Network, ...]:
    reached: dict[str, dict[str, NetworkKind]] = {}
    for host in hosts:
        for nic in host.nics:
            reached.setdefault(nic.network or "", {})[host.name] = nic.kind
    return tuple(
        Network(name, next(iter(there.values())), tuple(there), "assumed" if name == "roce0" else "as described")
        for name, there in reached.items()
    )


def _described_link(
    a: Island, b: Island, hosts: Sequence[Host], kinds: Mapping[str, NetworkKind], own: str | None
) -> IslandLink:
    """How two described islands talk: over the network that is theirs alone, else the one outward, else a fabric that
    both are on. Raises ConfigError where nothing joins them."""
    there = [[h for h in hosts if h.name in island.hosts] for island in (a, b)]
    common = {n.network for n in there[0][0].nics} & {n.network for n in there[1][0].nics}
    network = next((n for n in (own, "outward", a.fabric) if n in common), None)
    if network is None:
        raise ConfigError(
            f"nothing joins {a.name} and {b.name}: their fabrics differ",
            hint=f"say what does: ';25GbE' after the islands, or --link {a.name}-{b.name}=25GbE",
        )
    rate = min(sum(n.rate_bytes_per_s or 0 for h in side for n in h.nics if n.network == network) for side in there)
    said = "assumed: TCP over the default NICs" if network == "roce0" else f"TCP over {network}, as described"
    tcp = TransportOption("tcp", True, said, rate, networks=(network,))
    kind = NETWORKS[kinds[network]]
    if not kind.verbs:
        why = "only libfabric reaches it, which no engine here uses" if kind.plugin else "without RDMA"
        rdma = TransportOption("rdma", False, f"{network} is {kind.word}: {why}")
    else:
        rdma = TransportOption(
            "rdma", True, said.replace("TCP", "RDMA from pinned host memory"), rate, networks=(network,)
        )
    ways = (
        rdma,
        tcp,
        TransportOption("direct", False, "not proved: direct needs both ends to have registered device memory"),
        TransportOption("shm", False, "described islands share no host"),
        native_way(a, b, tcp),
    )
    return IslandLink((a.name, b.name), ways)


def _described_host(
    name: str,
    parts: Sequence[SpecPart],
    classes: Mapping[str, DeviceClass],
    fabric: Fabric | None,
    network: str,
    outward: Sequence[tuple[Fabric, str]],
) -> Host:
    rows = [classes[part.device_class] for part in parts]
    if fabric is None:
        own = tuple(Nic(f"nic{i}", "roce", row.nic_bytes_per_s, network) for i, row in enumerate(rows))
    else:
        own = fabric.nics("nic", network, len(parts))
    others = [f.nics(f"{at}.", at, len(parts)) for f, at in outward]
    devices = []
    for index, (part, row) in enumerate(zip(parts, rows, strict=True)):
        memory = min(row.memory_bytes, part.memory_bytes or row.memory_bytes)
        near = (own[index % len(own)].name, *(nics[index % len(nics)].name for nics in others))
        devices.append(Device(index, row.vendor, part.device_class, memory, near, speed=part.speed))
    memory = HOST_MEMORY * sum(row.memory_bytes for row in rows)
    return Host(name, devices=tuple(devices), nics=(*own, *chain.from_iterable(others)), memory_bytes=memory)


def _parse_part(part: str, text: str, classes: Mapping[str, DeviceClass]) -> tuple[SpecPart, int | None]:
    """A class and its count, and the GPUs of a host where they are said."""
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"'{part}' in the SPEC '{text}' is not a class and a count", hint=_SHAPE)
    name = classes[match["name"].strip().lower()].name
    hosts, times, per_host = match["count"].partition("x")
    gpus = _whole(per_host, part) if times else None
    count = _whole(hosts, part) * (gpus or 1)
    speed = 1.0 if match["speed"] is None else _speed(match["speed"], part)
    memory = None if match["memory"] is None else parse_memory(match["memory"])
    return SpecPart(name, count, speed, memory), gpus


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
