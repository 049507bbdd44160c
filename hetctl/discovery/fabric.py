"""From the facts of all hosts to the cluster: networks, islands, rails, and how each pair of islands can talk. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetctl.comm.contract.cluster import Access, Cluster, Device, Host, Island, Member, Network
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.fabrics import NETWORKS, plugin_missing
from hetctl.comm.contract.facts import HostFacts, facts_to_data
from hetctl.comm.contract.natives import HOST
from hetctl.discovery.devices import FoundDevices, devices_of, foreign_words
from hetctl.discovery.networks import Ignored, NetworkPort, Subnets, name_networks, ports_of, twins_apart
from hetctl.discovery.transports import TransportFacts, link_between
from hetctl.trainer.planning.hardware import CLASSES, Hardware, not_in_the_table
from hetctl.trainer.planning.own_hardware import with_own

_BEST_FIRST = list(NETWORKS)


@dataclass(frozen=True)
class Report:
    """What discovery brought back from one host: its facts, or the word and sentence for why there are none."""

    name: str
    access: Access
    facts: HostFacts | None = None
    data_address: str | None = None  # declared by a person
    slots: int | None = None
    status: str = "ok"
    reason: str | None = None
    hint: str = ""
    seconds: float = 0.0
    clock_ahead_s: tuple[float, float] | None = None  # of this machine's clock: at least, at most

    @property
    def ok(self) -> bool:
        return self.facts is not None


@dataclass(frozen=True)
class Note:
    """Something a person should know of one host, or (host None) of the cluster."""

    host: str | None
    sentence: str


@dataclass(frozen=True)
class NotedCluster:
    """The cluster and what was noticed while it was put together."""

    cluster: Cluster
    notes: tuple[Note, ...]


def build(
    reports: Sequence[Report], *, named: Subnets | None = None, classes: Sequence[DeviceClass] = ()
) -> NotedCluster:
    """The cluster that the reports describe. Hosts without facts stay in it with their status and reason."""
    notes: list[Note] = []
    ports = _all_ports(reports, named or {}, notes)
    networks, names = name_networks([p for host in ports.values() for p in host])
    with_gpus = any(r.facts is not None and r.facts.gpus for r in reports)
    table = CLASSES.with_own(classes)
    found = {r.name: _found(r, ports.get(r.name, []), with_gpus, notes, table) for r in reports}
    devices = {name: one.devices for name, one in found.items()}
    estimated = _estimated(found.values(), notes)
    addresses = data_addresses(reports, ports)
    hosts = tuple(_host(r, devices[r.name], ports.get(r.name, []), names, addresses.get(r.name)) for r in reports)
    islands = find_islands(hosts, networks, lacking=_lacking(reports, hosts, networks, notes))
    ground = TransportFacts(hosts, {r.name: r.facts for r in reports if r.facts}, ports, names, _declared(reports))
    links = tuple(link_between(a, b, ground) for a, b in combinations(islands, 2))
    return NotedCluster(with_own(Cluster(hosts, islands, networks, links), (*estimated, *classes)), tuple(notes))


def find_islands(
    hosts: Sequence[Host], networks: Sequence[Network], *, lacking: Container[tuple[str, str]] = ()
) -> tuple[Island, ...]:
    """Per vendor: the hosts of the best fabric that several share, then of the next; whoever is left stands alone.

    InfiniBand before RoCE before Ethernet, larger before smaller. Generations of one vendor share an island.
    `lacking`: (vendor, network) of those that some host's native library cannot use.
    """
    islands: list[Island] = []
    order = sorted(networks, key=lambda n: (_BEST_FIRST.index(n.kind), -len(n.hosts), n.name))
    by_vendor: dict[str, list[Host]] = defaultdict(list)
    for host in hosts:
        for vendor in dict.fromkeys(d.vendor for d in host.devices):
            by_vendor[vendor].append(host)
    for vendor, members in by_vendor.items():
        free = {h.name: h for h in members}
        for network in (n for n in order if (vendor, n.name) not in lacking):
            together = [free[name] for name in free if name in network.hosts]
            if len(together) > 1:
                islands.append(_island(vendor, network.name, together))
                free = {name: h for name, h in free.items() if h not in together}
        islands += [_island(vendor, "host", [host]) for host in free.values()]
    return _named(islands, {h.name: h for h in hosts})


def _lacking(
    reports: Sequence[Report], hosts: Sequence[Host], networks: Sequence[Network], notes: list[Note]
) -> set[tuple[str, str]]:
    """(vendor, network) where a native library lacks its plugin on a host: the island takes TCP, and it is said."""
    found: set[tuple[str, str]] = set()
    devices = {h.name: dict.fromkeys(d.vendor for d in h.devices if d.vendor != HOST) for h in hosts}
    for network in (n for n in networks if NETWORKS[n.kind].plugin):
        row = NETWORKS[network.kind]
        seen = [(r, r.facts) for r in reports if r.facts is not None and r.name in network.hosts]
        for report, facts, vendor in ((r, f, v) for r, f in seen for v in devices[r.name]):
            if missing := plugin_missing(facts, vendor, report.access.env):
                found.add((vendor, network.name))
                instead = f"between hosts its island takes TCP over {row.ip}"
                notes.append(Note(report.name, f"it has {row.word} ({network.name}), but {missing}: {instead}"))
    return found


def data_addresses(reports: Sequence[Report], ports: Mapping[str, Sequence[NetworkPort]]) -> dict[str, str]:
    """Where each host's ranks talk: as declared, else its address in the IP network most hosts share, fastest first."""
    members: dict[str, set[str]] = defaultdict(set)
    rates: dict[str, float] = defaultdict(float)
    for port in _flat(ports):
        if port.subnet is not None and port.address is not None:
            members[port.subnet].add(port.host)
            rates[port.subnet] = max(rates[port.subnet], port.facts.rate_bytes_per_s or 0.0)
    best_first = sorted(members, key=lambda s: (-len(members[s]), -rates[s], s))
    chosen: dict[str, str] = {}
    for report in reports:
        own = {p.subnet: p.address for p in ports.get(report.name, ()) if p.address is not None}
        found = next((own[s] for s in best_first if s in own), None)
        address = report.data_address or found
        if address is not None:
            chosen[report.name] = address
    return chosen


def _all_ports(reports: Sequence[Report], named: Subnets, notes: list[Note]) -> dict[str, list[NetworkPort]]:
    ports: list[NetworkPort] = []
    ignored: list[Ignored] = []
    for report in reports:
        if report.facts is not None:
            own, left = ports_of(report.name, report.facts, exclude=report.access.exclude_nics, named=named)
            ports += own
            ignored += left
    ports, twins = twins_apart(ports)
    notes += [Note(None, sentence) for sentence in twins]
    notes += [Note(i.host, f"{i.nic} is left out: {i.reason}") for i in ignored if not i.plain]
    notes += [Note(p.host, f"{p.facts.name} reaches no known network: {p.why}") for p in ports if p.key is None]
    by_host: dict[str, list[NetworkPort]] = defaultdict(list)
    for port in ports:
        by_host[port.host].append(port)
    return by_host


def _found(
    report: Report, ports: Sequence[NetworkPort], with_gpus: bool, notes: list[Note], table: Hardware
) -> FoundDevices:
    if report.facts is None:
        return FoundDevices()
    found = devices_of(report.facts, ports, only=report.access.gpus if with_gpus else None, table=table)
    problems = [*found.notes, *(f"{says}; docs/adding-a-vendor.md" for says in foreign_words(report.facts))]
    notes += [Note(report.name, sentence) for sentence in problems]
    for vendor, state in report.facts.vendors.items():
        if state not in ("present", "absent"):
            notes.append(Note(report.name, f"{vendor}: {state}"))
    if not with_gpus:
        return FoundDevices(_cpu_devices(report, ports, notes))
    if not found.devices and not problems:
        notes.append(Note(report.name, "no GPU was found on it"))
    return found


def _estimated(found: Iterable[FoundDevices], notes: list[Note]) -> tuple[DeviceClass, ...]:
    """Of each product that the hardware table lacks the most cautious row, said aloud once."""
    rows: dict[str, DeviceClass] = {}
    for row in sorted((row for one in found for row in one.estimated), key=lambda row: row.sustained_tflops):
        rows.setdefault(row.name, row)
    notes += [Note(None, not_in_the_table(row)) for row in rows.values()]
    return tuple(rows.values())


def _cpu_devices(report: Report, ports: Sequence[NetworkPort], notes: list[Note]) -> tuple[Device, ...]:
    """Nobody has a GPU: each host stands as CPU process slots, as many as a hostfile gives it, else one."""
    count = report.slots or (len(report.access.gpus) if report.access.gpus else 1)
    notes.append(Note(report.name, f"no host has a GPU: it stands as {count} CPU process{'es' * (count > 1)}"))
    nics = tuple(dict.fromkeys(p.facts.netdev or p.facts.name for p in ports if p.address))[:1]
    memory = report.facts.system.memory_total_bytes if report.facts else None
    return tuple(Device(i, "cpu", "cpu", memory // count if memory else None, nics) for i in range(count))


def _host(
    report: Report,
    devices: tuple[Device, ...],
    ports: Sequence[NetworkPort],
    names: Mapping[tuple[str, str], str],
    address: str | None,
) -> Host:
    return Host(
        name=report.name,
        access=report.access,
        data_address=address,
        status=report.status,
        reason=report.reason,
        devices=devices,
        nics=tuple(p.nic(names.get((p.host, p.facts.name))) for p in ports),
        memory_bytes=report.facts.system.memory_total_bytes if report.facts is not None else None,
        facts=facts_to_data(report.facts) if report.facts is not None else {},
    )


def _island(vendor: str, fabric: str, hosts: Sequence[Host]) -> Island:
    members = tuple(Member(h.name, d.index) for h in hosts for d in h.devices if d.vendor == vendor)
    return Island("", vendor, fabric, members)


def _named(islands: Sequence[Island], hosts: Mapping[str, Host]) -> tuple[Island, ...]:
    """Islands named by their classes, numbered from the second of the same name on, as emulation does."""
    counts: dict[str, int] = defaultdict(int)
    named = []
    for island in islands:
        classes = {
            m: next(d.device_class for d in hosts[m.host].devices if d.index == m.device) for m in island.members
        }
        base = "+".join(dict.fromkeys(classes.values()))
        counts[base] += 1
        name = base if counts[base] == 1 else f"{base}#{counts[base]}"
        named.append(Island(name, island.vendor, island.fabric, island.members))
    return tuple(named)


def _declared(reports: Iterable[Report]) -> frozenset[str]:
    return frozenset(r.name for r in reports if r.data_address is not None)


def _flat(ports: Mapping[str, Sequence[NetworkPort]]) -> list[NetworkPort]:
    return [p for host in ports.values() for p in host]
