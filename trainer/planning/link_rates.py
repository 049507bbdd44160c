"""How fast stages and replicas talk: inside a host, inside an island, and over the bridge between islands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, pairwise
from math import inf

from hetctl.comm.contract.cluster import Cluster, Island, TransportOption
from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.fabrics import NETWORKS
from hetctl.comm.contract.ports import sides
from hetctl.comm.contract.transports import NATIVE, TRANSPORTS
from hetctl.trainer.planning.assemble import choose_transport
from hetctl.trainer.planning.pools import PORT_REACHED, RING_REACHED, Pool
from hetctl.trainer.planning.profile import BridgeProfile
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import SyncRate

NATIVE_LATENCY_S = 10e-6


@dataclass(frozen=True)
class LinkRate:
    """What joins two islands, or the hosts of one: bytes per second of one rank alone, of a host, and of all together.

    Ports are shared: ranks of one host never get more than its ports carry, however many they are.
    """

    per_rank: float
    total: float
    latency_s: float
    transport: str
    sums: float | None = None  # bytes of a sum per second that ranks of two islands reach together, where measured
    per_host: tuple[float, float] = (inf, inf)  # of the islands in the order of their names
    assumed: float | None = None  # of the ports' rate, the share that is reached, where nothing was measured

    def faster(self, times: float) -> LinkRate:
        """The link if all its ports were so many times as fast."""
        hosts = (times * self.per_host[0], times * self.per_host[1])
        return replace(self, per_rank=times * self.per_rank, total=times * self.total, per_host=hosts)

    def host_of(self, island: str, other: str) -> float:
        """What a host of `island` carries towards the other one."""
        return self.per_host[island > other]


@dataclass(frozen=True, eq=False)
class LinkRates:
    """What joins each pair of islands; a pair that cannot talk is missing, with the reason in `refused`."""

    bridges: Mapping[frozenset[str], LinkRate]
    refused: Mapping[frozenset[str], HetctlError]
    inside: Mapping[str, LinkRate]  # between the hosts of an island
    measured: tuple[BridgeProfile, ...] = ()

    def can_talk(self, a: Pool, b: Pool) -> bool:
        return a.island == b.island or frozenset((a.island, b.island)) in self.bridges

    def alike(self, pools: Sequence[Pool]) -> bool:
        """Whether all these pools are in different islands joined by equal bridges."""
        names = [p.island for p in pools]
        pairs = [frozenset(pair) for pair in combinations(names, 2)]
        return len(set(names)) == len(names) and len({self.bridges.get(pair) for pair in pairs}) <= 1

    @cached_property
    def hop_seconds(self) -> Callable[[PoolUse, PoolUse, float], float]:
        """Seconds for one micro-batch's `payload` bytes from a stage of `a` to a stage of `b`, each worked out once.

        The ranks of a tensor group carry a share of the values each, and put them together in their host.
        """
        return cache(self._hop_seconds)

    def tied_seconds(self, first: PoolUse, last: PoolUse, nbytes: float) -> float:
        """Seconds in which the ends of a pipeline sum the gradient of an embedding that both hold, of so many bytes: it
        crosses once each way at once, as two replicas' gradients do."""
        return self._seconds_between(first, last, nbytes, sums=True)

    def hops(self, stages: Sequence[PoolUse], payload: float) -> tuple[float, ...]:
        """Seconds of each boundary along a pipeline."""
        return tuple(self.hop_seconds(a, b, payload) for a, b in pairwise(stages))

    def _hop_seconds(self, a: PoolUse, b: PoolUse, payload: float) -> float:
        return self._seconds_between(a, b, payload) + max(_joining(u, payload) for u in (a, b))

    def _seconds_between(self, a: PoolUse, b: PoolUse, nbytes: float, *, sums: bool = False) -> float:
        """Seconds in which so many bytes go from the ranks of one stage to those of another."""
        ranks = min(a.width * a.tensor, b.width * b.tensor)
        if a.pool is b.pool and a.site.per_host >= a.width * a.tensor + b.width * b.tensor:
            return NATIVE_LATENCY_S + nbytes / (ranks * a.pool.rates.native_bytes_per_s)
        link = self._between(a.pool, b.pool)
        here, there = (u.hosts * link.host_of(u.pool.island, v.pool.island) for u, v in ((a, b), (b, a)))
        each = (link.sums if sums else None) or link.per_rank
        return link.latency_s + nbytes / min(ranks * each, here, there, link.total)

    def _between(self, a: Pool, b: Pool) -> LinkRate:
        return self.inside[a.island] if a.island == b.island else self.bridges[frozenset((a.island, b.island))]

    def sync_rate(self, inside: Pool, outside: Pool) -> SyncRate:
        """How fast ranks of two pools exchange gradients."""
        if inside.island == outside.island:
            return SyncRate(RING_REACHED * min(p.rates.nic_bytes_per_s for p in (inside, outside)), inf, inf, 1)
        link = self._between(inside, outside)
        rate, most = link.sums or link.per_rank, link.host_of(inside.island, outside.island)
        row = TRANSPORTS[link.transport]
        return SyncRate(rate, most, link.total, 1 - row.taken(rate), row.launching_s)


def read_link_rates(
    cluster: Cluster, pools: tuple[Pool, ...], *, forced: str = "auto", measured: Sequence[BridgeProfile] = ()
) -> LinkRates:
    """The bridges of a cluster as the recipe's transport leaves them; a profile's rates where links have none."""
    islands = {i.name: i for i in cluster.islands}
    names = list(dict.fromkeys(p.island for p in pools))
    bridges: dict[frozenset[str], LinkRate] = {}
    refused: dict[frozenset[str], HetctlError] = {}
    for a, b in combinations(names, 2):
        try:
            transport = choose_transport(cluster.link(a, b), a, b, forced=forced, measured=measured)
        except HetctlError as error:
            refused[frozenset((a, b))] = error
        else:
            bridges[frozenset((a, b))] = _link(cluster, islands[a], islands[b], transport, measured)
    inside = {n: _inside(cluster, islands[n], [p for p in pools if p.island == n]) for n in names}
    return LinkRates(bridges, refused, inside, tuple(measured))


def _joining(use: PoolUse, payload: float) -> float:
    """Seconds in which a tensor group gathers what its ranks received."""
    if use.tensor == 1:
        return 0.0
    return (use.tensor - 1) / use.tensor * payload / use.width / use.pool.rates.native_bytes_per_s


def _inside(cluster: Cluster, island: Island, pools: Sequence[Pool]) -> LinkRate:
    """The native library between an island's hosts: over its fabric's ports, or each device's share of the usual."""
    kind = {n.name: n.kind for n in cluster.networks}.get(island.fabric, "host")
    fast = NETWORKS[kind].verbs or NETWORKS[kind].plugin
    over = TransportOption("rdma" if fast else "tcp", True, "", networks=(island.fabric,))
    found = sides(cluster, island, island, over)
    if found is None:
        return LinkRate(min(p.rates.nic_bytes_per_s for p in pools), inf, NATIVE_LATENCY_S, NATIVE)
    own, host = (PORT_REACHED * rate for rate in (found[0].per_device, found[0].total / len(found[0].hosts)))
    return LinkRate(own, inf, NATIVE_LATENCY_S, NATIVE, per_host=(host, host))


def _link(
    cluster: Cluster, a: Island, b: Island, transport: TransportOption, measured: Sequence[BridgeProfile]
) -> LinkRate:
    """What a transport between two islands carries: measured where it was, otherwise a share of what its ports do."""
    row, known = TRANSPORTS[transport.kind], next((m for m in measured if m.transport == transport.kind), None)
    a, b = sorted((a, b), key=lambda island: island.name)
    ends = sides(cluster, a, b, transport)
    nominal = min(side.total for side in ends) if ends else None
    own = min(side.per_device for side in ends) if ends else None
    rate = transport.rate_bytes_per_s or nominal
    reached = 1.0 if transport.measured else row.reached
    if known and own and not transport.measured:
        reached = max(reached, known.message_bytes_per_s / own)  # what one rank gets, its port carries
    total = inf if rate is None else rate * reached
    if ends and own and nominal and rate:
        each, hosts = own * total / nominal, [side.total / len(side.hosts) * total / nominal for side in ends]
    else:
        each = row.unknown_rate if rate is None else total
        hosts = [total / min(len(a.hosts), len(b.hosts))] * 2
    latency = row.latency_s if transport.latency_s is None else transport.latency_s
    if known and not transport.measured:
        latency = known.latency_s
    return LinkRate(
        min(known.message_bytes_per_s if known else each, total),
        total,
        latency,
        transport.kind,
        sums=known.all_reduce_bytes_per_s if known else None,
        per_host=(hosts[0], hosts[1]),
        assumed=None if transport.measured or known or rate is None else reached,
    )
