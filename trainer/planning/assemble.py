"""From replicas to a whole plan: ranks, groups and what runs them, segments, bridges and their rails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise

from hetctl.comm.contract.cluster import Cluster, IslandLink, Nic, TransportOption
from hetctl.comm.contract.errors import ConfigError, Undetermined
from hetctl.comm.contract.fabrics import NETWORKS
from hetctl.comm.contract.placement import joined_natively
from hetctl.comm.contract.plan import (
    BackendName,
    GroupKind,
    GroupNet,
    Plan,
    PlannedBridge,
    PlannedGroup,
    PlannedRail,
    PlannedRank,
    Predicted,
    Replica,
    Segment,
    planned_islands,
    segment_of,
    segments_of,
    summing_groups,
    tied_groups,
)
from hetctl.comm.contract.ports import carrying, nearest, sides_of
from hetctl.comm.contract.transports import NATIVE
from hetctl.comm.contract.units import show_rate
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.planning.pools import seats
from hetctl.trainer.planning.profile import BridgeProfile
from hetctl.trainer.recipe import Recipe


def assemble(
    cluster: Cluster,
    recipe: Recipe,
    shape: ModelShape,
    *,
    replicas: tuple[Replica, ...],
    schedule: str,
    forwards_ahead: tuple[int, ...],
    predicted: Predicted | None,
    reasons: Sequence[str],
    measured: Sequence[BridgeProfile] = (),
    over_replicas: bool = False,
) -> Plan:
    """The plan of these replicas. Raises ConfigError where a bridge cannot be what the recipe forces."""
    ranks = _ranks(cluster, replicas)
    segments = tuple(segment_of(replicas, span) for span in segments_of(replicas))
    where = {r.rank: r.island for r in ranks}
    tied = tied_groups(replicas) if shape.tied_embeddings else ()
    pairs = _crossings(replicas, segments, where, tied)
    bridges = tuple(_bridge(cluster, recipe, ranks, pair, measured) for pair in pairs)
    groups = _Groups(cluster, ranks, bridges).all(replicas, segments, tied)
    return Plan(
        cluster_digest=cluster.digest,
        model=recipe.model.name,
        seq_len=recipe.model.seq_len,
        global_batch=sum(r.samples for r in replicas),
        schedule=schedule,
        forwards_ahead=forwards_ahead,
        islands=planned_islands(cluster),
        ranks=ranks,
        replicas=replicas,
        segments=segments,
        groups=groups,
        bridges=bridges,
        predicted=predicted,
        reasons=tuple(reasons),
        over_replicas=over_replicas,
    )


def choose_transport(
    link: IslandLink | None, a: str, b: str, *, forced: str = "auto", measured: Sequence[BridgeProfile] = ()
) -> TransportOption:
    """The first usable transport of a link, or the forced one. Raises ConfigError with the transport's reason.

    Islands of one vendor take its own library over sockets where both that and the first bridge were measured and its
    sums are faster, or where there is no other way.
    """
    if link is None:
        raise Undetermined(
            f"nothing is known about how '{a}' and '{b}' can talk", hint="run `hetctl discover` with both"
        )
    if forced != "auto":
        for transport in link.transports:
            if transport.kind == forced and transport.usable:
                return transport
            if transport.kind == forced:
                raise ConfigError(f"the bridge {a} - {b} cannot be {forced}: {transport.reason}", hint="--bridge auto")
        raise ConfigError(
            f"the bridge {a} - {b} cannot be {forced}: nothing offers it there",
            hint="--bridge auto; an older cluster file does not know newer ways: `hetctl discover` again",
        )
    usable = sorted((t for t in link.transports if t.usable), key=lambda t: t.kind == NATIVE)
    if usable:
        return _faster(usable[0], usable[-1], {m.transport: m.all_reduce_bytes_per_s for m in measured})
    why = "; ".join(f"{t.kind}: {t.reason}" for t in link.transports) or "no transport is listed"
    raise ConfigError(
        f"'{a}' and '{b}' cannot talk: {why}", hint="`hetctl doctor --level pairs` names the first reason"
    )


def _faster(first: TransportOption, last: TransportOption, sums: Mapping[str, float]) -> TransportOption:
    """The first way, or the native one, which is the last, where sums were measured over both."""
    if last is first or last.kind != NATIVE or not {first.kind, NATIVE} <= sums.keys():
        return first
    native, other = sums[NATIVE], sums[first.kind]
    if native <= other:
        return replace(
            first, reason=f"{first.reason}; sums measured at {show_rate(other)}, natively {show_rate(native)}"
        )
    why = f"{last.reason}; sums measured at {show_rate(native)}, over {first.kind} {show_rate(other)}"
    return replace(last, reason=why)


def _ranks(cluster: Cluster, replicas: Sequence[Replica]) -> tuple[PlannedRank, ...]:
    placed: dict[int, tuple[int, tuple[int, ...]]] = {}
    for number, whole in enumerate(replicas):
        for index, stage in enumerate(whole.stages):
            for rank in stage.ranks:
                placed[rank] = (number, (*placed.get(rank, (number, ()))[1], index))
    ranks = []
    for rank, island, member, device in seats(cluster):
        replica, stages = placed.get(rank, (None, ()))
        ranks.append(
            PlannedRank(
                rank=rank,
                host=member.host,
                device=member.device,
                device_class=device.device_class,
                island=island,
                replica=replica,
                stages=tuple(stages),
                nics=device.nics,
                speed=device.speed,
                memory_bytes=device.room_bytes,
            )
        )
    return tuple(ranks)


class _Groups:
    """Names every process group of a plan and says what runs it."""

    def __init__(self, cluster: Cluster, ranks: Sequence[PlannedRank], bridges: Sequence[PlannedBridge]) -> None:
        self.cluster = cluster
        self.ranks = ranks
        self.bridges = bridges
        self.islands = {i.name: i for i in cluster.islands}
        self.networks = {n.name: n.kind for n in cluster.networks}

    def all(
        self, replicas: Sequence[Replica], segments: Sequence[Segment], tied: tuple[tuple[int, ...], ...]
    ) -> tuple[PlannedGroup, ...]:
        groups: list[PlannedGroup] = []
        for number, replica in enumerate(replicas):
            first_of = {stage.ranks: index for index, stage in reversed(list(enumerate(replica.stages)))}
            for ranks, index in sorted(first_of.items(), key=lambda found: found[1]):  # a device's stages share groups
                stage = replica.stages[index]
                place, step = f"r{number}.s{index}", stage.tensor_parallel
                if step > 1:
                    parts = [ranks[k : k + step] for k in range(0, len(ranks), step)]
                    groups += [self.one(f"tensor.{place}.{k}", "tensor", p) for k, p in enumerate(parts)]
                if stage.width > 1:
                    for k in range(step):
                        name = f"data.{place}" if step == 1 else f"data.{place}.{k}"
                        groups.append(self.one(name, "data", ranks[k::step]))
                        groups += self.shards(f"shards.{place}.{k}", ranks[k::step], stage.shards)
            for index, (a, b) in enumerate(pairwise(replica.stages)):
                groups.append(self.one(f"pipeline.r{number}.{index}-{index + 1}", "pipeline", (*a.ranks, *b.ranks)))
        inside = [g for g in groups if g.kind != "pipeline"]
        groups += [
            self.one(name, "segment", r) for name, r in summing_groups(replicas, segments, tied=tied, held=inside)
        ]
        return tuple(groups)

    def shards(self, name: str, ranks: tuple[int, ...], count: int) -> list[PlannedGroup]:
        """Neighbours that share optimiser state, where they are fewer than the whole stage."""
        if count in (1, len(ranks)):
            return []
        return [self.one(f"{name}.{j}", "data", ranks[j : j + count]) for j in range(0, len(ranks), count)]

    def one(self, name: str, kind: GroupKind, ranks: tuple[int, ...]) -> PlannedGroup:
        islands = list(dict.fromkeys(self.ranks[r].island for r in ranks))
        if len(joined_natively(islands, self.bridges)) > 1:
            return PlannedGroup(name, kind, ranks, "het")
        island = self.islands[islands[0]]
        backend: BackendName = self.cluster.library_of(island.vendor)
        hosts = {self.ranks[r].host for r in ranks}
        if len(hosts) == 1 or backend == "gloo":
            return PlannedGroup(name, kind, ranks, backend)
        fabric = NETWORKS[self.networks.get(island.fabric, "host")] if len(islands) == 1 else NETWORKS["host"]
        net: GroupNet = "ib" if fabric.verbs else "plugin" if fabric.plugin else "socket"
        return PlannedGroup(name, kind, ranks, backend, net)


def _crossings(
    replicas: Sequence[Replica],
    segments: Sequence[Segment],
    where: dict[int, str],
    tied: tuple[tuple[int, ...], ...],
) -> list[tuple[str, str]]:
    """Pairs of islands that must talk, in order of first need: neighbours in a pipeline, sharers of a segment."""
    found: dict[frozenset[str], tuple[str, str]] = {}

    def note(names: Iterable[str]) -> None:
        for a, b in combinations(dict.fromkeys(names), 2):
            found.setdefault(frozenset((a, b)), (a, b))

    for replica in replicas:
        for first, second in pairwise(replica.stages):
            note(where[r] for r in (*first.ranks, *second.ranks))
    if len(replicas) > 1:
        for segment in segments:
            for group in segment.groups:
                note(where[r] for r in group)
    for holders in tied:
        note(where[r] for r in holders)
    return list(found.values())


def _bridge(
    cluster: Cluster,
    recipe: Recipe,
    ranks: Sequence[PlannedRank],
    pair: tuple[str, str],
    measured: Sequence[BridgeProfile],
) -> PlannedBridge:
    a, b = pair
    link = cluster.link(a, b)
    transport = choose_transport(link, a, b, forced=recipe.bridge.transport, measured=measured)
    chosen = "forced by the recipe" if recipe.bridge.transport != "auto" else "the best usable one"
    others = [_instead(way) for way in link.transports if way.kind != transport.kind] if link else []
    reason = "; ".join([f"{transport.kind} between {a} and {b}, {chosen}: {transport.reason}", *others])
    ends = [[r for r in ranks if r.island == name and r.replica is not None] for name in pair]
    count = min(len(e) for e in ends)
    lanes = [(ends[0][k * len(ends[0]) // count], ends[1][k * len(ends[1]) // count]) for k in range(count)]
    rails = _rails(cluster, pair, lanes, transport)
    return PlannedBridge(pair, transport.kind, rails, reason, recipe.bridge.transport != "auto")


def _instead(way: TransportOption) -> str:
    """One of the other ways, in words."""
    if not way.usable:
        return f"not {way.kind}: {way.reason}"
    rate = f" ({show_rate(way.rate_bytes_per_s)})" if way.rate_bytes_per_s is not None else ""
    return f"{way.kind} as well{rate}: {way.reason}"


def _rails(
    cluster: Cluster,
    pair: tuple[str, str],
    lanes: Sequence[tuple[PlannedRank, PlannedRank]],
    transport: TransportOption,
) -> tuple[PlannedRail, ...]:
    """Each lane on ports that share a network, and its share of them: together they carry what discovery found."""
    a, b = (next(i for i in cluster.islands if i.name == name) for name in pair)
    ports = carrying(cluster, (a, b), transport)
    joint = sides_of(cluster, a, b, ports)
    nominal = min(side.total for side in joint) if joint else 0.0
    ends = [_lane_ports(cluster, lane, ports) for lane in lanes]
    used = [[(rank.host, nic) for rank, nic in zip(*end, strict=True)] for end in zip(lanes, ends, strict=True)]
    users = Counter(chain.from_iterable(used))
    rates = {(h.name, n.name): n.rate_bytes_per_s or 0.0 for h in cluster.hosts for n in h.nics}
    total = transport.rate_bytes_per_s
    rails = []
    for lane, nics, ports_used in zip(lanes, ends, used, strict=True):
        rate = None if total is None else total / len(lanes)
        if joint is not None:
            share = min(rates[port] / users[port] for port in ports_used)
            rate = share * (total or nominal) / nominal
        rails.append(PlannedRail(lane[0].rank, nics[0], lane[1].rank, nics[1], rate))
    return tuple(rails)


def _lane_ports(
    cluster: Cluster, lane: tuple[PlannedRank, PlannedRank], ports: Mapping[str, Mapping[str, Nic]]
) -> tuple[str, str]:
    """The nearest two ports of a lane's ranks on one network; where no ports are known to carry it, the nearest."""
    ours, theirs = ((r.nics, ports.get(r.host, {})) for r in lane)
    joined = ((a.name, b.name) for a in nearest(*ours) for b in nearest(*theirs) if a.network == b.network)
    first, second = ((*r.nics, "")[0] for r in lane)
    return next(joined, (first, second))
