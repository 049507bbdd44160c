"""Which ports of hosts carry what crosses between islands, and how fast: shared by all that cross them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetctl.comm.contract.cluster import Cluster, Island, Nic, TransportOption
from hetctl.comm.contract.fabrics import NETWORKS
from hetctl.comm.contract.transports import TRANSPORTS


@dataclass(frozen=True)
class Side:
    """One island's end of a link: bytes per second of each host's ports together, and of one device's own ports."""

    hosts: Mapping[str, float]
    per_device: float  # of the device with the least

    @property
    def total(self) -> float:
        return sum(self.hosts.values())


def carrying(cluster: Cluster, islands: Sequence[Island], way: TransportOption) -> dict[str, dict[str, Nic]]:
    """By host and name the ports that carry a transport, on networks that all these hosts reach; {} in one host."""
    hosts = [cluster.host_by_name[name] for name in dict.fromkeys(h for i in islands for h in i.hosts)]
    usable = {h.name: [n for n in h.nics if _suits(n, cluster, way)] for h in hosts}
    if len(hosts) < 2:
        return {}
    common = set.intersection(*({n.network for n in nics} for nics in usable.values()))
    common = {network for network in common if not way.networks or network in way.networks}
    return {name: _rails([n for n in nics if n.network in common]) for name, nics in usable.items()} if common else {}


def sides(cluster: Cluster, a: Island, b: Island, way: TransportOption) -> tuple[Side, Side] | None:
    """Both ends of what joins two islands (or, the same twice, an island's hosts); None where a rate is unknown."""
    return sides_of(cluster, a, b, carrying(cluster, (a, b), way))


def sides_of(
    cluster: Cluster, a: Island, b: Island, ports: Mapping[str, Mapping[str, Nic]]
) -> tuple[Side, Side] | None:
    """The same of the ports that carry it."""
    if not ports or any(n.rate_bytes_per_s is None for nics in ports.values() for n in nics.values()):
        return None
    return _side(cluster, a, ports), _side(cluster, b, ports)


def nearest(own: Sequence[str], ports: Mapping[str, Nic]) -> Iterator[Nic]:
    """The carrying ports of a host, a device's own (by name, nearest first) before the others."""
    first = [name for name in own if name in ports]
    yield from (ports[name] for name in first)
    yield from (nic for name, nic in ports.items() if name not in first)


def _side(cluster: Cluster, island: Island, ports: Mapping[str, Mapping[str, Nic]]) -> Side:
    rates = {name: tuple((nic, n.rate_bytes_per_s or 0.0) for nic, n in ports[name].items()) for name in island.hosts}
    hosts = {name: sum(rate for _, rate in of) for name, of in rates.items()}
    ways = {(rates[member.host], cluster.device(member).nics) for member in island.members}  # few, of thousands
    own = (sum(rate for nic, rate in of if nic in nics) or sum(rate for _, rate in of) for of, nics in ways)
    return Side(hosts, min(own))


def _suits(nic: Nic, cluster: Cluster, way: TransportOption) -> bool:
    """Whether a port may carry a transport at all. Described ports have no address, and could have one.

    Ports that only native libraries reach carry what names their network.
    """
    if nic.network is None:
        return False
    if TRANSPORTS[way.kind].engine:
        row = NETWORKS[nic.kind]
        return row.verbs or (row.plugin and nic.network in way.networks)
    return nic.address is not None or cluster.source == "described"


def _rails(nics: Sequence[Nic]) -> dict[str, Nic]:
    """Those worth being rails, by name: none slower than half the fastest."""
    fastest = max((n.rate_bytes_per_s or 0.0 for n in nics), default=0.0)
    return {n.name: n for n in nics if n.rate_bytes_per_s is None or n.rate_bytes_per_s * 2 >= fastest}
