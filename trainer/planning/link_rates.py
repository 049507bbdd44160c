"""How fast stages and replicas talk: inside a host, inside an island, and over the bridge between islands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetctl.comm.contract.cluster import Cluster, TransportOption
from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.transports import TRANSPORTS
from hetctl.trainer.planning.assemble import choose_transport
from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.profile import BridgeProfile
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import SyncRate

NATIVE_LATENCY_S = 10e-6


@dataclass(frozen=True)
class LinkRate:
    """A bridge as a stage boundary sees it: bytes per second of one rank's link and of all together."""

    per_rank: float
    total: float
    latency_s: float
    transport: str
    sums: float | None = None  # bytes of a sum per second that ranks of two islands reach together, where measured


@dataclass(frozen=True, eq=False)
class LinkRates:
    """What joins each pair of islands; a pair that cannot talk is missing, with the reason in `refused`."""

    bridges: Mapping[frozenset[str], LinkRate]
    refused: Mapping[frozenset[str], HetctlError]
    measured: tuple[BridgeProfile, ...] = ()

    def can_talk(self, a: Pool, b: Pool) -> bool:
        return a.island == b.island or frozenset((a.island, b.island)) in self.bridges

    def alike(self, pools: Sequence[Pool]) -> bool:
        """Whether all these pools are in different islands joined by equal bridges."""
        names = [p.island for p in pools]
        pairs = [frozenset(pair) for pair in combinations(names, 2)]
        return len(set(names)) == len(names) and len({self.bridges.get(pair) for pair in pairs}) <= 1

    def hop_seconds(self, a: PoolUse, b: PoolUse, payload: float) -> float:
        """Seconds for one micro-batch's `payload` bytes from a stage of `a` to a stage of `b`.

        The ranks of a tensor group carry a share of the values each, and put them together in their host.
        """
        ranks = min(a.width * a.tensor, b.width * b.tensor)
        joined = max(_joining(u, payload) for u in (a, b))
        if a.pool.island != b.pool.island:
            link = self.bridges[frozenset((a.pool.island, b.pool.island))]
            return link.latency_s + payload / min(ranks * link.per_rank, link.total) + joined
        near = a.pool is b.pool and a.site.per_host >= a.width * a.tensor + b.width * b.tensor
        rates = (a.pool.rates, b.pool.rates)
        each = min(r.native_bytes_per_s if near else r.nic_bytes_per_s for r in rates)
        return NATIVE_LATENCY_S + payload / (ranks * each) + joined

    def sync_rate(self, inside: Pool, outside: Pool) -> SyncRate:
        """How fast ranks of two pools exchange gradients."""
        if inside.island == outside.island:
            return SyncRate(min(inside.rates.nic_bytes_per_s, outside.rates.nic_bytes_per_s), float("inf"))
        link = self.bridges[frozenset((inside.island, outside.island))]
        return SyncRate(link.sums or link.per_rank, link.total)


def read_link_rates(
    cluster: Cluster, pools: tuple[Pool, ...], *, forced: str = "auto", measured: Sequence[BridgeProfile] = ()
) -> LinkRates:
    """The bridges of a cluster as the recipe's transport leaves them; a profile's rates where links have none."""
    nic: dict[str, float] = {}
    for pool in pools:
        nic[pool.island] = min(nic.get(pool.island, float("inf")), pool.rates.nic_bytes_per_s)
    bridges: dict[frozenset[str], LinkRate] = {}
    refused: dict[frozenset[str], HetctlError] = {}
    for a, b in combinations(nic, 2):
        try:
            transport = choose_transport(cluster.link(a, b), a, b, forced=forced, measured=measured)
        except HetctlError as error:
            refused[frozenset((a, b))] = error
        else:
            bridges[frozenset((a, b))] = _link(transport, min(nic[a], nic[b]), measured)
    return LinkRates(bridges, refused, tuple(measured))


def _joining(use: PoolUse, payload: float) -> float:
    """Seconds in which a tensor group gathers what its ranks received."""
    if use.tensor == 1:
        return 0.0
    return (use.tensor - 1) / use.tensor * payload / use.width / use.pool.rates.native_bytes_per_s


def _link(transport: TransportOption, nic: float, measured: Sequence[BridgeProfile]) -> LinkRate:
    known = next((b for b in measured if b.transport == transport.kind), None)
    if known is not None and not transport.measured:
        each = known.message_bytes_per_s
        return LinkRate(each, float("inf"), known.latency_s, transport.kind, sums=known.all_reduce_bytes_per_s)
    latency = TRANSPORTS[transport.kind].latency_s if transport.latency_s is None else transport.latency_s
    if transport.rate_bytes_per_s is None:
        each = TRANSPORTS[transport.kind].unknown_rate
        return LinkRate(each, float("inf"), latency, transport.kind)
    reached = 1.0 if transport.measured else TRANSPORTS[transport.kind].reached
    total = transport.rate_bytes_per_s * reached
    each = min(nic * reached, total) if not transport.measured else total
    return LinkRate(each, total, latency, transport.kind)
