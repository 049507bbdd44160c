"""How two islands can talk: each transport with whether it is usable and why, or the first thing it lacks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from hetctl.comm.contract.cluster import Host, Island, IslandLink, TransportOption, native_way
from hetctl.comm.contract.fabrics import NETWORKS, RDMA_KINDS
from hetctl.comm.contract.facts import HostFacts
from hetctl.comm.contract.units import MiB, listed, show_bytes
from hetctl.discovery.networks import NetworkPort

_MEMLOCK_NEEDED = 64 * MiB  # less does not hold the pinned slots of one rail
_NO_LIBFABRIC = "only libfabric reaches it, which the engines here do not use (nixl over UCX, mooncake over verbs)"
_ENGINES = {  # package -> what it is
    "nixl": "nixl",
    "mooncake_transfer_engine": "mooncake",
    "mooncake_transfer_engine_cuda13": "mooncake",
    "mooncake_transfer_engine_non_cuda": "mooncake",
    "mooncake_transfer_engine_rocm": "mooncake",
}


@dataclass(frozen=True)
class TransportFacts:
    """What transports stand on: hosts, their facts and ports, and the networks the ports reach."""

    hosts: Sequence[Host]
    facts: Mapping[str, HostFacts]
    ports: Mapping[str, Sequence[NetworkPort]]
    networks: Mapping[tuple[str, str], str]  # (host, NIC) -> network
    declared: frozenset[str] = frozenset()  # hosts whose data address a person gave


def link_between(a: Island, b: Island, ground: TransportFacts) -> IslandLink:
    """Everything known about how two islands can talk, usable ways first, in the order in which they are chosen.

    Direct stands behind RDMA: files cannot prove it, ranks do when they start, and then go further than was planned.
    The native library over sockets comes last: it is taken where a measurement shows it to be faster.
    """
    tcp = _tcp(a, b, ground)
    ways = (_shm(a, b), _rdma(a, b, ground), _direct(a, b, ground), tcp, native_way(a, b, tcp))
    return IslandLink((a.name, b.name), tuple(sorted(ways, key=lambda way: not way.usable)))


def _shm(a: Island, b: Island) -> TransportOption:
    shared = set(a.hosts) & set(b.hosts)
    everyone = set(a.hosts) | set(b.hosts)
    if shared == everyone and len(shared) == 1:
        return TransportOption("shm", True, f"both are on {min(shared)}")
    if shared:
        return TransportOption("shm", False, f"only {len(shared)} of {len(everyone)} hosts hold both")
    return TransportOption("shm", False, "they share no host")


def _tcp(a: Island, b: Island, ground: TransportFacts) -> TransportOption:
    hosts = _both(a, b)
    if len(hosts) == 1:
        return TransportOption("tcp", True, f"both are on {hosts[0]}: loopback")
    common = _common(hosts, ground, lambda port: port.subnet if port.address else None)
    if common:
        rate = _rate(a, b, ground, lambda port: port.subnet in common and port.address is not None)
        reason = f"all have addresses in {listed(sorted(common), 3)}{_without_rdma(hosts, common, ground)}"
        return TransportOption("tcp", True, reason, rate)
    if ground.declared >= set(hosts):
        return TransportOption("tcp", True, "all have a data address that was given; not measured")
    lonely = next((h for h in hosts if not any(p.address for p in ground.ports.get(h, ()))), None)
    if lonely:
        return TransportOption("tcp", False, f"{lonely} has no address on a data NIC")
    return TransportOption(
        "tcp", False, "no IP network holds all their hosts; if a router joins them, give each its data_address"
    )


def _without_rdma(hosts: Sequence[str], subnets: Container[str], ground: TransportFacts) -> str:
    """Said where hosts have InfiniBand and yet none of these IP networks runs over it."""
    ports = [p for h in hosts for p in ground.ports.get(h, ())]
    carrying = [p for p in ports if p.address is not None and p.subnet in subnets]
    over_it = any(p.facts.link_layer == "infiniband" for p in carrying)  # a bond or VLAN over its interfaces, too
    if over_it or not any(p.kind == "infiniband" for p in ports):
        return ""
    return f" ({listed(sorted({p.kind for p in carrying}))}: no IP runs over their InfiniBand)"


def _rdma(a: Island, b: Island, ground: TransportFacts) -> TransportOption:
    hosts = _both(a, b)
    missing = rdma_missing(hosts, ground)
    if missing:
        return TransportOption("rdma", False, missing)
    common = _common_rdma(hosts, ground)
    rate = _rate(a, b, ground, lambda port: ground.networks.get((port.host, port.facts.name)) in common)
    return TransportOption("rdma", True, f"all reach {listed(sorted(common), 3)}, from pinned host memory", rate)


def _direct(a: Island, b: Island, ground: TransportFacts) -> TransportOption:
    hosts = _both(a, b)
    if len(hosts) == 1:
        return TransportOption("direct", False, "on one host shared memory is the shorter way")
    missing = rdma_missing(hosts, ground)
    if missing:
        return TransportOption("direct", False, missing)
    for host in hosts:
        rdma = ground.facts[host].rdma
        if not rdma.peer_memory_modules and not rdma.dma_buf:
            known = rdma.peer_memory_modules is not None and rdma.dma_buf is not None
            says = "has neither a peer memory module nor dma-buf" if known else "does not show peer memory or dma-buf"
            return TransportOption("direct", False, f"{host} {says}")
    return TransportOption(
        "direct", True, "not proved yet: ranks try it when they start, and take it where both ends can"
    )


def rdma_missing(hosts: Sequence[str], ground: TransportFacts) -> str:
    """The first thing RDMA between these hosts lacks, '' when nothing is known to be missing."""
    if len(hosts) == 1:
        return "both are on one host"
    for host in hosts:
        kinds = {p.kind for p in ground.ports.get(host, ())}
        if why := ground.facts[host].why_unknown("nics"):
            return f"{host}: whether it has RDMA ports is not known: {why}"
        if not kinds & set(RDMA_KINDS):
            row = next((NETWORKS[kind] for kind in kinds if NETWORKS[kind].plugin), None)
            return f"{host} has no RDMA port in use" if row is None else f"{host} has {row.word}: {_NO_LIBFABRIC}"
    if not _common_rdma(hosts, ground):
        return "no InfiniBand subnet or RoCE network holds all their hosts"
    for host in hosts:
        lacking = _host_lacks(ground.facts[host])
        if lacking:
            return f"{host}: {lacking}"
    return _engine_missing(hosts, ground)


def _engine_missing(hosts: Sequence[str], ground: TransportFacts) -> str:
    """Why no engine moves the data, as far as the ranks' Pythons are known."""
    common = set(_ENGINES.values())
    for host in hosts:
        pythons = [p for p in ground.facts[host].interpreters if not p.problem]
        if not pythons:
            continue  # nothing is known of them
        ranks = [p for p in pythons if p.vendors] or pythons[:1]
        found = set.intersection(*({e for package, e in _ENGINES.items() if package in p.packages} for p in ranks))
        if not found:
            return f"{host}: its Python has neither nixl nor mooncake (pip install 'hetctl[nixl]')"
        common &= found
    return "" if common else "the hosts' Pythons have no engine in common: nixl or mooncake on all of them"


def _host_lacks(facts: HostFacts) -> str:
    rdma = facts.rdma
    if rdma.libraries is None:
        return "unknown whether libibverbs is there"
    if not any("libibverbs" in library.name for library in rdma.libraries):
        return "libibverbs is not installed"
    if rdma.device_files is not None and not any("uverbs" in name for name in rdma.device_files):
        return "this user may not open /dev/infiniband/uverbs*"
    if isinstance(rdma.memlock_bytes, int) and rdma.memlock_bytes < _MEMLOCK_NEEDED:
        return f"processes may lock only {show_bytes(rdma.memlock_bytes)} of memory (ulimit -l)"
    return ""


def _both(a: Island, b: Island) -> tuple[str, ...]:
    return tuple(dict.fromkeys(a.hosts + b.hosts))


def _common_rdma(hosts: Sequence[str], ground: TransportFacts) -> set[str]:
    return _common(
        hosts, ground, lambda p: ground.networks.get((p.host, p.facts.name)) if p.kind in RDMA_KINDS else None
    )


def _common(hosts: Sequence[str], ground: TransportFacts, network: Callable[[NetworkPort], str | None]) -> set[str]:
    """The networks that every host reaches."""
    reached = [{n for p in ground.ports.get(h, ()) if (n := network(p)) is not None} for h in hosts]
    return set.intersection(*reached) if reached else set()


def _rate(a: Island, b: Island, ground: TransportFacts, counts: Callable[[NetworkPort], bool]) -> float | None:
    """What the weaker island's rails carry together, in bytes per second; None when one rate is unknown."""
    totals: list[float] = []
    for island in (a, b):
        total = 0.0
        for host in island.hosts:
            rates = [p.facts.rate_bytes_per_s for p in ground.ports.get(host, ()) if counts(p)]
            known = [r for r in rates if r is not None]
            if not known or len(known) < len(rates):
                return None
            total += sum(r for r in known if r * 2 >= max(known))  # as rails are chosen
        totals.append(total)
    return min(totals)
