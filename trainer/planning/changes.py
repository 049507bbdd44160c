"""Clusters that one could have instead: more hosts, faster networks, more memory, or without some of what there is.

Every change is a whole `Cluster`, so that it is planned as any other. What is added has the ports of a host that is
there: the network is taken to have room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Literal

from hetctl.comm.contract.cluster import (
    Cluster,
    Device,
    Host,
    Island,
    IslandLink,
    Member,
    NetworkKind,
    Nic,
    TransportOption,
    native_way,
)
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.emulate import GPUS_PER_HOST, HOST_MEMORY
from hetctl.comm.contract.fabrics import NETWORKS, RDMA_KINDS
from hetctl.comm.contract.ports import sides
from hetctl.trainer.planning.hardware import CLASSES, Hardware

Kind = Literal["link", "memory", "add", "remove"]
COMMON_GBITS = (10, 25, 100, 200, 400, 800)  # ports that are sold, Gbit/s
SECOND = "-second"  # of a port that is there twice
_BEST_FIRST: Sequence[NetworkKind] = [kind for kind in NETWORKS if kind != "host"]


@dataclass(frozen=True, eq=False)
class Change:
    """A cluster that one could have, and what it costs per hour beyond (less: below zero) the one there is."""

    kind: Kind
    what: str
    cluster: Cluster
    price_per_hour: float | None = None  # None: unknown
    devices: int = 0  # more than there are
    idle: bool = False  # what is left out did nothing


def usual_host(cluster: Cluster) -> int:
    """How many devices most of its hosts have."""
    sizes = Counter(len(h.devices) for h in cluster.hosts if h.devices)
    return max(sizes, key=lambda size: (sizes[size], size), default=GPUS_PER_HOST)


def price_of(cluster: Cluster, table: Hardware) -> float | None:
    """Per hour, of all its devices; None where a class has no price."""
    classes = Counter(cluster.device(m).device_class for i in cluster.islands for m in i.members)
    return _total(classes, table)


def _total(classes: Mapping[str, int], table: Hardware) -> float | None:
    prices = [(table[name].price_per_hour, count) for name, count in classes.items()]
    return None if any(p is None for p, _ in prices) else sum((p or 0.0) * count for p, count in prices)


def more_devices(cluster: Cluster, row: DeviceClass, count: int, *, per_host: int) -> Change:
    """So many more of a class, in hosts of `per_host`: in the island that they can join, else in one of their own."""
    home = _joined(cluster, row)
    pattern = _pattern(cluster, home)
    sizes = [per_host] * (count // per_host) + [count % per_host] * (count % per_host > 0)
    hosts = tuple(_like(pattern, row, size, f"{row.name}-added-{k}") for k, size in enumerate(sizes))
    members = tuple(Member(h.name, d.index) for h in hosts for d in h.devices)
    fabric = _fabric(cluster, pattern)
    networks = tuple(
        replace(n, hosts=(*n.hosts, *(h.name for h in hosts))) if pattern.name in n.hosts else n
        for n in cluster.networks
    )
    grown = replace(_knowing(cluster, row), hosts=(*cluster.hosts, *hosts), networks=networks)
    if home is None:
        island = Island(_free_name(cluster, row.name), row.vendor, fabric, members)
        grown = replace(grown, islands=(*cluster.islands, island))
        grown = replace(grown, links=(*cluster.links, *_new_links(cluster, grown, island, pattern)))
        where = "as an island of their own"
    else:
        island = replace(home, fabric=home.fabric if home.fabric != "host" else fabric, members=home.members + members)
        grown = replace(grown, islands=tuple(island if i is home else i for i in cluster.islands))
        grown = _linked_again(cluster, grown, {home.name})
        where = f"to {home.name}"
    what = f"Adding {count} {row.name} {where}" + (f", {len(hosts)} hosts" if len(hosts) > 1 else "")
    return Change("add", what, grown, _times(row.price_per_hour, count), count)


def faster_networks(cluster: Cluster, network: str, islands: Sequence[Island]) -> Iterator[Change]:
    """A network's slowest ports at the next common rate, over RoCE where it has none, and twice as many of them."""
    names = {name for island in islands for name in island.hosts}
    ports = [n for h in cluster.hosts if h.name in names for n in h.nics if n.network == network]
    known = [n.rate_bytes_per_s for n in ports if n.rate_bytes_per_s]
    if not known or len(known) < len(ports):
        return  # unknown rates cannot be compared
    slowest, kind = min(known), ports[0].kind
    where = f"on {network} ({', '.join(i.name for i in islands)})"
    own = f"in place of {round(slowest * 8 / 1e9, 1):g} Gbit/s"
    if (step := next((g for g in COMMON_GBITS if _rate(g) > slowest * 1.01), None)) is not None:
        faster = partial(_at_least, gbits=step)
        made = _with_ports(cluster, network, names, faster)
        yield Change("link", f"{step} Gbit/s {NETWORKS[kind].word} {own} {where}", made)
        if kind == "ethernet":
            made = _with_ports(cluster, network, names, lambda n: faster(replace(n, kind="roce")))
            yield Change("link", f"{step} Gbit/s RoCE {own} Ethernet {where}", _with_rdma(made, network))
    more = _with_ports(cluster, network, names, lambda n: (n, replace(n, name=n.name + SECOND)))
    yield Change("link", f"Twice as many ports a host {where}", more)


def more_memory(cluster: Cluster, island: Island, device_class: str, table: Hardware) -> Change | None:
    """The class's larger sibling in its place: as fast, with more memory. None where the table has none."""
    own = table[device_class]
    row = max((r for r in table.values() if _larger(own, r)), key=lambda r: r.memory_bytes, default=None)
    if row is None:
        return None
    chosen = {m for m in island.members if cluster.device(m).device_class == device_class}
    hosts = tuple(
        replace(h, devices=tuple(_as(d, row) if Member(h.name, d.index) in chosen else d for d in h.devices))
        if h.name in island.hosts
        else h
        for h in cluster.hosts
    )
    dearer = None
    if row.price_per_hour is not None and own.price_per_hour is not None:
        dearer = (row.price_per_hour - own.price_per_hour) * len(chosen)
    what = f"{row.name} in place of the {len(chosen)} {device_class} of {island.name}"
    return Change("memory", what, replace(_knowing(cluster, row), hosts=hosts), dearer)


def more_host_memory(cluster: Cluster, island: Island) -> Change | None:
    """Twice the memory in an island's hosts; None where it is not known how much they have."""
    known = [h.memory_bytes for h in cluster.hosts if h.name in island.hosts and h.memory_bytes]
    if not known:
        return None
    hosts = tuple(
        replace(h, memory_bytes=2 * h.memory_bytes) if h.memory_bytes and h.name in island.hosts else h
        for h in cluster.hosts
    )
    return Change("memory", f"Twice the host memory in {island.name}", replace(cluster, hosts=hosts))


def without(cluster: Cluster, members: Sequence[Member], what: str, table: Hardware) -> Change:
    """The cluster without these devices, and without the hosts and islands that have no others."""
    gone = set(members)
    saved = _total(Counter(cluster.device(m).device_class for m in gone), table)
    kept = [replace(i, members=tuple(m for m in i.members if m not in gone)) for i in cluster.islands]
    islands = tuple(i for i in kept if i.members)
    hosts = [
        replace(h, devices=tuple(d for d in h.devices if Member(h.name, d.index) not in gone)) for h in cluster.hosts
    ]
    names = {i.name for i in islands}
    links = tuple(link for link in cluster.links if names.issuperset(link.islands))
    smaller = replace(cluster, hosts=tuple(h for h in hosts if h.devices), islands=islands, links=links)
    touched = {i.name for i, before in zip(kept, cluster.islands, strict=True) if i.members != before.members}
    price = None if saved is None else -saved
    return Change("remove", what, _linked_again(cluster, smaller, touched), price, -len(gone))


def _times(price: float | None, count: int) -> float | None:
    return None if price is None else price * count


def _knowing(cluster: Cluster, row: DeviceClass) -> Cluster:
    """The cluster with a row that the hardware table does not have so."""
    known = {r.name: r for r in (*cluster.classes, row)}
    return cluster if CLASSES.get(row.name) == row else replace(cluster, classes=tuple(known.values()))


def _joined(cluster: Cluster, row: DeviceClass) -> Island | None:
    """The island that new hosts of a class can join: of its vendor and with a network, the same class first."""
    able = [
        i
        for i in cluster.islands
        if i.vendor == row.vendor and _fabric(cluster, cluster.host_by_name[i.hosts[0]]) != "host"
    ]
    return max(able, key=lambda i: cluster.device(i.members[0]).device_class == row.name, default=None)


def _fabric(cluster: Cluster, host: Host) -> str:
    """The network between hosts like this one: its island's, else the best that it has a port on; 'host' for none."""
    fabric = next((i.fabric for i in cluster.islands if host.name in i.hosts), "host")
    if fabric != "host":
        return fabric
    reached = [n for n in host.nics if n.network and n.kind in _BEST_FIRST]
    return min(reached, key=lambda n: _BEST_FIRST.index(n.kind)).network or "host" if reached else "host"


def _pattern(cluster: Cluster, home: Island | None) -> Host:
    """The host whose ports new ones have: of their island, else of one that is joined to others best."""
    if home is None:
        link = _best_link(cluster)
        home = next(i for i in cluster.islands if link is None or i.name in link.islands)
    return cluster.host_by_name[home.hosts[0]]


def _best_link(cluster: Cluster) -> IslandLink | None:
    """The fastest there is between islands, as far as rates are known."""
    usable = [link for link in cluster.links if any(t.usable for t in link.transports)]
    rates = [max(t.rate_bytes_per_s or 0.0 for t in link.transports if t.usable) for link in usable]
    return usable[rates.index(max(rates))] if rates else None


def _like(pattern: Host, row: DeviceClass, count: int, name: str) -> Host:
    """A host of so many devices with the ports of another one; of the same class also with its memory."""
    alike = {d.device_class for d in pattern.devices} == {row.name} and len(pattern.devices) == count
    devices = []
    for index in range(count):
        near = pattern.devices[index % len(pattern.devices)]
        memory = near.memory_bytes if near.device_class == row.name else row.memory_bytes
        devices.append(Device(index, row.vendor, row.name, memory, near.nics))
    memory = pattern.memory_bytes if alike else HOST_MEMORY * count * row.memory_bytes
    return replace(pattern, name=name, access=None, devices=tuple(devices), memory_bytes=memory, facts={})


def _free_name(cluster: Cluster, name: str) -> str:
    taken = {i.name for i in cluster.islands}
    return next(n for k in range(1, len(taken) + 2) if (n := name if k == 1 else f"{name}#{k}") not in taken)


def _new_links(before: Cluster, after: Cluster, island: Island, pattern: Host) -> Iterator[IslandLink]:
    """What joins a new island to each other one: what joins the island whose ports it has, and to that one the best."""
    twin = next(i for i in before.islands if pattern.name in i.hosts)
    best = _best_link(before)
    for other in before.islands:
        known = best if other is twin else before.link(twin.name, other.name)
        if known is None and other is twin:
            yield IslandLink((island.name, other.name), _assumed_ways(after, island, other))
        elif known is not None:
            yield _relinked(before, after, known, (island, other))


def _assumed_ways(cluster: Cluster, a: Island, b: Island) -> tuple[TransportOption, ...]:
    """Ways over the network that both are on, as described clusters have them; TCP of unknown rate where none is."""
    kinds = {n.name: n.kind for n in cluster.networks}
    over = (a.fabric,) if a.fabric in kinds else ()
    tcp = TransportOption("tcp", True, "assumed: a network that all hosts reach", networks=over)
    rdma = TransportOption("rdma", kinds.get(a.fabric) in RDMA_KINDS, "over the same network", networks=over)
    return (*((rdma,) if rdma.usable else ()), tcp, native_way(a, b, tcp))


def _linked_again(before: Cluster, after: Cluster, changed: set[str]) -> Cluster:
    """With the rates of links as the ports of changed islands now are."""
    islands = {i.name: i for i in after.islands}
    links = tuple(
        _relinked(before, after, link, (islands[link.islands[0]], islands[link.islands[1]]))
        if changed & set(link.islands)
        else link
        for link in after.links
    )
    return replace(after, links=links)


def _relinked(before: Cluster, after: Cluster, link: IslandLink, pair: tuple[Island, Island]) -> IslandLink:
    """A link's ways between two islands, which may be others: rates in proportion to the ports at both ends."""
    old = {i.name: i for i in before.islands}
    ends = old[link.islands[0]], old[link.islands[1]]
    hosts = set(pair[0].hosts) | set(pair[1].hosts)
    ways = []
    for way in link.transports:
        if way.kind == "shm" and len(hosts) > 1:
            ways.append(replace(way, usable=False, reason="they share no host"))
        elif way.kind != "native":
            had, has = sides(before, *ends, way), sides(after, *pair, way)
            times = min(s.total for s in has) / min(s.total for s in had) if had and has else 1.0
            rate = way.rate_bytes_per_s
            ways.append(replace(way, rate_bytes_per_s=rate and rate * times))
    tcp = next((w for w in ways if w.kind == "tcp"), None)
    native = (native_way(*pair, tcp),) if tcp and any(w.kind == "native" for w in link.transports) else ()
    return IslandLink((pair[0].name, pair[1].name), (*ways, *native))


def _rate(gbits: int) -> float:
    return gbits / 8 * 1e9


def _at_least(nic: Nic, gbits: int) -> tuple[Nic, ...]:
    return (replace(nic, rate_bytes_per_s=max(nic.rate_bytes_per_s or 0.0, _rate(gbits))),)


def _with_ports(cluster: Cluster, network: str, names: set[str], changed: Callable[[Nic], tuple[Nic, ...]]) -> Cluster:
    """With other ports on a network in these hosts; devices that were near a port are near what stands for it."""

    def host(old: Host) -> Host:
        new = {n.name: changed(n) if n.network == network else (n,) for n in old.nics}
        near = {name: tuple(n.name for n in nics) for name, nics in new.items()}
        devices = tuple(
            replace(d, nics=tuple(chain.from_iterable(near.get(name, (name,)) for name in d.nics))) for d in old.devices
        )
        return replace(old, nics=tuple(chain.from_iterable(new.values())), devices=devices)

    hosts = tuple(host(h) if h.name in names else h for h in cluster.hosts)
    touched = {i.name for i in cluster.islands if names & set(i.hosts)}
    return _linked_again(cluster, replace(cluster, hosts=hosts), touched)


def _with_rdma(cluster: Cluster, network: str) -> Cluster:
    """With RDMA between islands whose hosts are all on a network that is RoCE now."""
    on = {h.name for h in cluster.hosts if any(n.network == network and n.kind in RDMA_KINDS for n in h.nics)}
    reached = {i.name for i in cluster.islands if on.issuperset(i.hosts)}
    way = TransportOption("rdma", True, f"RDMA over {network}", networks=(network,))
    links = tuple(
        replace(link, transports=(way, *(t for t in link.transports if t.kind != "rdma")))
        if reached.issuperset(link.islands) and not any(t.kind == "rdma" and t.usable for t in link.transports)
        else link
        for link in cluster.links
    )
    networks = tuple(
        replace(n, kind="roce") if on.issuperset(n.hosts) and n.name == network else n for n in cluster.networks
    )
    return replace(cluster, links=links, networks=networks)


def _larger(own: DeviceClass, other: DeviceClass) -> bool:
    """Whether a class is the same but for more memory: in the same kind of host, no slower, with no higher peak."""
    what = attrgetter("vendor", "peak_tflops", "host_bytes_per_s")
    alike = what(own) == what(other) and own.peak_tflops > 0
    rates = ("memory_bytes_per_s", "native_bytes_per_s", "nic_bytes_per_s")
    no_slower = all(getattr(other, name) >= getattr(own, name) for name in rates)
    return alike and no_slower and other.memory_bytes > own.memory_bytes


def _as(device: Device, row: DeviceClass) -> Device:
    return replace(device, device_class=row.name, memory_bytes=row.memory_bytes)
