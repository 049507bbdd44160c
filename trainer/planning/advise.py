"""What to buy: changes of the cluster, each planned again with the same recipe, and what they give for their price.

Where nothing fits, the least of a class that makes the model fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from hetctl.comm.contract.cluster import Cluster, Island
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.ports import carrying
from hetctl.trainer.planning.assemble import choose_transport
from hetctl.trainer.planning.changes import (
    Change,
    Kind,
    faster_networks,
    more_devices,
    more_host_memory,
    more_memory,
    price_of,
    usual_host,
    without,
)
from hetctl.trainer.planning.costs import PLAIN
from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.precision import precision_of
from hetctl.trainer.planning.predict import Prediction
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.reschedule import under_schedules
from hetctl.trainer.planning.search import Search
from hetctl.trainer.planning.would_fit import AT_ALL, Asked, least_added

# (most kinds of devices, most devices, classes that are planned with): a search takes 0.2 s to 5 s by these
SEARCHED = ((2, 16, 12), (2, 512, 8), (2, inf, 12), (4, inf, 5), (inf, inf, 4))
MOST_NETWORKS = 4
MOST_LEFT_OUT = 3  # islands that are used, and left out on trial: the dearest for their speed
SHARE = 1 / 16  # of a large cluster's devices: fewer are often lost in widths that must divide the batch
WORTH_SAYING = 0.002  # relative gain
ROUGHLY = 0.002  # how exact a gain needs to be
KEEP = 6  # arrangements that are tried under every schedule
MOST_FREE = 0.7  # of usable memory: fuller devices might gain from more
_ORDER: Sequence[Kind] = ("link", "memory", "add", "remove")


@dataclass(frozen=True)
class Advice:
    """One change: what a step takes then, and what it costs. Prices are in whatever currency the classes' are."""

    kind: Kind
    what: str
    devices: int  # more than there are (fewer: below zero)
    step_time_s: float
    tokens_per_s: float
    gain: float | None  # relative, in tokens/s; None where nothing fits without it
    price_per_hour: float | None  # beyond what is paid now; None: unknown
    tokens_per_price: float | None  # of the cluster after the change; None: a price is unknown
    added_per_price: float | None = None  # tokens that the addition alone brings for its price


@dataclass(frozen=True)
class Advised:
    """All advice, and how the cluster as it is compares; None of it is known where no plan fits."""

    advice: tuple[Advice, ...]
    looked_at: int  # classes of the table
    planned: int  # of these, with how many it was planned
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    price_per_hour: float | None = None
    tokens_per_price: float | None = None


def advise(
    asked: Asked,
    problem: Problem,
    chosen: Prediction,
    plan: Plan,
    *,
    every_class: bool = True,
    said: Callable[[str], None] = lambda _: None,
) -> Advised:
    """What is worth changing, given the best plan as things are: by kind, and what gives most for its price first.

    Without `every_class` only more of the classes that there are, faster networks and more memory. `said` hears what
    is being tried. Raises ConfigError for an emulation: its devices are this machine's.
    """
    _refuse_emulation(asked.cluster)
    able, picked = _classes(asked, problem.pools, every=every_class)
    tokens, price = problem.samples * problem.costs.seq_len, price_of(asked.cluster, asked.table)
    now = tokens / chosen.seconds
    per_price = None if not price else now * 3600 / price
    found = []
    for change in _changes(asked, problem, chosen, plan, picked, removals=every_class):
        said(change.what)
        if change.idle:
            seconds: float | None = chosen.seconds  # the plan does without it already
        else:
            worse = change.kind == "remove"
            limit = inf if worse else chosen.candidate.seconds * (1 - WORTH_SAYING)
            seconds = _planned(asked, change, problem, limit)
        made = None if seconds is None else _advice(change, tokens / seconds, tokens, now, price)
        if made and _worth(made, per_price):
            found.append(made)
    return Advised(tuple(sorted(found, key=_rank)), able, len(picked), chosen.seconds, now, price, per_price)


def what_would_fit(asked: Asked, said: Callable[[str], None] = lambda _: None) -> Advised:
    """Of each promising class the fewest devices with which a model fits that does not: cheapest, then fewest first."""
    _refuse_emulation(asked.cluster)
    pools = asked.problem(asked.cluster, AT_ALL).pools
    able, picked = _classes(asked, pools, every=True, by_memory=True)
    price, found = price_of(asked.cluster, asked.table), []
    for row in picked:
        said(f"more {row.name}")
        change = least_added(asked, row)
        seconds = _fastest(asked.problem(change.cluster, AT_ALL)) if change else None
        if change and seconds:
            tokens = asked.recipe.batch.global_batch * asked.recipe.model.seq_len
            found.append(_advice(change, tokens / seconds, tokens, None, price))
    ordered = sorted(found, key=lambda a: (inf if a.price_per_hour is None else a.price_per_hour, a.devices))
    return Advised(tuple(ordered), able, len(picked))


def _refuse_emulation(cluster: Cluster) -> None:
    if cluster.source == "emulated":
        raise ConfigError(
            "an emulation's devices are this machine's: nothing that is bought would change them",
            hint="`hetctl plan --emulate SPEC` describes a cluster instead",
        )


def _classes(
    asked: Asked, pools: Sequence[Pool], *, every: bool, by_memory: bool = False
) -> tuple[int, list[DeviceClass]]:
    """(how many classes could be added, those that are promising): what is there, the fastest, those that give most for
    their price. None that would change the precision that is trained in."""
    precision = precision_of(asked.cluster, asked.recipe)
    own = [asked.table[name] for name in dict.fromkeys(p.device_class for p in pools)]
    able = {row.name: row for row in (*own, *asked.table.values()) if row.vendor != "cpu" and row.computes(precision)}
    speeds = asked.speeds or {}

    def worth(row: DeviceClass) -> float:
        return row.memory_bytes if by_memory else speeds.get(row.name, row.sustained_in(precision))

    if not every:
        return len(own), own
    most = next(n for kinds, many, n in SEARCHED if len(pools) <= kinds and sum(p.size for p in pools) <= many)
    others = sorted((r for r in able.values() if r not in own), key=lambda r: (-worth(r), r.price_per_hour or inf))
    others = [r for r in others if not any(_better(other, r) for other in able.values())]
    priced = sorted((r for r in able.values() if r.price_per_hour), key=lambda r: -worth(r) / (r.price_per_hour or inf))
    mixed = [row for pair in zip([*priced, *others], others, strict=False) for row in pair]
    half = sorted((r for r in own if r.name in able), key=lambda r: -worth(r))[: most // 2]
    return len(able), list(dict.fromkeys([*half, *mixed, *others]))[:most]


def _better(other: DeviceClass, row: DeviceClass) -> bool:
    """Whether nothing speaks for a class beside another one, as fast and not smaller; prices would."""
    names = ("memory_bytes", "memory_bytes_per_s", "native_bytes_per_s", "nic_bytes_per_s", "host_bytes_per_s")
    alike = (other.vendor, other.peak_tflops) == (row.vendor, row.peak_tflops)
    no_less = all(getattr(other, name) >= getattr(row, name) for name in names)
    more = any(getattr(other, name) > getattr(row, name) for name in names)
    return alike and no_less and more and other.price_per_hour is None and row.price_per_hour is None


def _changes(
    asked: Asked, problem: Problem, chosen: Prediction, plan: Plan, classes: Sequence[DeviceClass], *, removals: bool
) -> Iterator[Change]:
    """Everything that is tried, for a plan that there is."""
    cluster, held = asked.cluster, plan.predicted.memory_bytes if plan.predicted else ()
    for network, islands in _networks(asked, chosen, plan):
        yield from faster_networks(cluster, network, islands)
    by_name = {i.name: i for i in cluster.islands}
    for pool in problem.pools:
        here = [stage for _, _, stage in chosen.candidate.stages if stage.use.pool is pool]
        # computing twice, or moving state to the host, spares memory too
        if any(stage.choice.mode != PLAIN or stage.memory_share(held) > MOST_FREE for stage in here):
            larger = more_memory(cluster, by_name[pool.island], pool.device_class, asked.table)
            yield from (larger,) if larger else ()
        if any(stage.host_bytes > MOST_FREE * pool.rates.host_memory_bytes for stage in here):
            hosts = more_host_memory(cluster, by_name[pool.island])
            yield from (hosts,) if hosts else ()
    per_host, devices = usual_host(cluster), sum(p.size for p in problem.pools)
    for row in classes:
        hosts_added = max(1, ceil(SHARE * devices / per_host))
        yield more_devices(cluster, row, hosts_added * per_host, per_host=per_host)
    if removals:
        yield from _removals(asked, plan)


def _networks(asked: Asked, chosen: Prediction, plan: Plan) -> list[tuple[str, list[Island]]]:
    """(network, the islands on it) that the plan's bridges take where it waits for them, and islands' own fabrics."""
    cluster = asked.cluster
    by_name, found = {i.name: i for i in cluster.islands}, dict[str, dict[str, Island]]()
    for bridge in plan.bridges if chosen.bridge_share > WORTH_SAYING else ():
        a, b = bridge.islands
        way = choose_transport(cluster.link(a, b), a, b, forced=asked.recipe.bridge.transport)
        ports = carrying(cluster, (by_name[a], by_name[b]), way)
        for network in dict.fromkeys(n.network for nics in ports.values() for n in nics.values()):
            found.setdefault(network or "", {}).update({a: by_name[a], b: by_name[b]})
    for island in cluster.islands:
        if island.fabric != "host" and len(island.hosts) > 1:
            found.setdefault(island.fabric, {})[island.name] = island
    return [(network, list(islands.values())) for network, islands in found.items()][:MOST_NETWORKS]


def _removals(asked: Asked, plan: Plan) -> Iterator[Change]:
    """Hosts that the plan leaves idle, then the islands that cost most for their speed, where prices are known."""
    cluster, table = asked.cluster, asked.table
    used = {(rank.island, rank.host) for rank in plan.ranks if rank.replica is not None}
    working = []
    for island in cluster.islands:
        spare = [m for m in island.members if (island.name, m.host) not in used]
        if len(spare) < len(island.members):
            working.append(island)
        if spare:
            what = f"the {len(spare)} of {island.name} in hosts" if island in working else island.name
            yield replace(without(cluster, spare, f"Leaving out {what} that the plan leaves idle", table), idle=True)
    if price_of(cluster, table) is None or len(working) < 2:
        return
    for island in sorted(working, key=lambda i: _price_of_speed(asked, i), reverse=True)[:MOST_LEFT_OUT]:
        yield without(cluster, island.members, f"Leaving out {island.name}", table)


def _price_of_speed(asked: Asked, island: Island) -> float:
    rows = [asked.table[asked.cluster.device(m).device_class] for m in island.members]
    return sum(row.price_per_hour or 0.0 for row in rows) / sum(row.sustained_tflops for row in rows)


def _planned(asked: Asked, change: Change, base: Problem, below: float) -> float | None:
    """Seconds of the best step of a changed cluster; None where it is not faster than that, or not possible."""
    try:
        problem = asked.problem(change.cluster, ROUGHLY)
    except HetctlError:  # wishes that name what is gone
        return None
    costs = replace(problem.costs, value_bytes=base.costs.value_bytes)
    return _fastest(replace(problem, costs=costs), below)


def _fastest(problem: Problem, below: float = inf) -> float | None:
    candidates = Search(problem, keep=KEEP, below=below).run().candidates
    return min((c.step_s for c in under_schedules(problem, candidates)), default=None)


def _advice(change: Change, per_s: float, tokens: float, now: float | None, price: float | None) -> Advice:
    """A change as it turned out. `tokens` are a step's, `now` tokens/s and `price` those of the cluster as it is."""
    more = change.price_per_hour
    total = None if price is None or more is None else price + more
    return Advice(
        change.kind,
        change.what,
        change.devices,
        step_time_s=tokens / per_s,
        tokens_per_s=per_s,
        gain=None if now is None else per_s / now - 1,
        price_per_hour=more,
        tokens_per_price=per_s * 3600 / total if total else None,
        added_per_price=(per_s - now) * 3600 / more if now is not None and more and more > 0 else None,
    )


def _worth(made: Advice, per_price: float | None) -> bool:
    """Whether a change is to be shown: something faster; of what is left out, what gave nothing or was too dear."""
    if made.kind != "remove":
        return made.gain is None or made.gain > WORTH_SAYING
    cheaper = made.tokens_per_price is not None and per_price is not None and made.tokens_per_price > per_price
    return cheaper or (made.gain is not None and made.gain > -WORTH_SAYING)


def _rank(made: Advice) -> tuple[float, ...]:
    """By kind; what has a price by what it gives for it, before what has none, by its gain."""
    value = made.tokens_per_price if made.kind == "remove" else made.added_per_price
    return _ORDER.index(made.kind), value is None, -(value or 0.0), -(made.gain or 0.0)
