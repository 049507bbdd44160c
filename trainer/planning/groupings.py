"""Which pools form which replicas: every way of few pools, and of many those that a descent comes by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from hetctl.trainer.planning.arrange import Batching
from hetctl.trainer.planning.costs import LayerCosts
from hetctl.trainer.planning.link_rates import LinkRates
from hetctl.trainer.planning.pipelines import Pipelines, WantedPipeline
from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.space import MANY_POOLS, partitions, views
from hetctl.trainer.planning.stages import SyncRate

MOST = 10  # groupings of many pools that are balanced in earnest
BACKWARD = 2 / 3  # of a micro-batch's seconds
SIZES = (1, 4, 8, 16, 64)  # micro-batches that the likely ones are estimated with

Groups = frozenset[frozenset[int]]  # of indices into a view; pools in none of them stay idle


@dataclass(frozen=True)
class Grouping:
    """Pools gathered into replicas, with a bound on the step time from their speeds alone."""

    replicas: tuple[tuple[Pool, ...], ...]
    clones: int
    bound: float


class Groupings:
    """The groupings of a problem's pools that are to be searched."""

    def __init__(self, problem: Problem, pipelines: Pipelines) -> None:
        self.problem, self.pipelines = problem, pipelines
        self.thinned = False

    @cached_property
    def all(self) -> list[Grouping]:
        """In order of their bounds; of many pools the likely ones only."""
        found: list[Grouping] = []
        pools = tuple(sorted(self.problem.pools, key=_kind))  # so that the order of islands means nothing
        for view in views(pools):
            possible = (self._grouping(view, Groups(map(frozenset, groups))) for groups in self._ways(view))
            found += [g for g in possible if g is not None]
        return sorted(found, key=lambda g: g.bound)

    def _ways(self, view: Sequence[Pool]) -> Iterator[Sequence[Sequence[int]]]:
        if len(view) < MANY_POOLS:
            yield from partitions(len(view))
            return
        self.thinned = True
        yield from _Descent(self.problem, self.pipelines, view, self._grouping).likely()

    def _grouping(self, view: Sequence[Pool], groups: Groups) -> Grouping | None:
        """These groups as replicas; None where they contradict a pin, or replicas cannot talk."""
        pins, links = self.problem.pins, self.problem.links
        replicas = tuple(tuple(view[i] for i in sorted(group)) for group in sorted(groups, key=sorted))
        used = [pool for pools in replicas for pool in pools]
        islands = {p.island for p in used}
        if pins.order is not None and (len(replicas) > 1 or islands != set(pins.order)):
            return None
        if pins.replicas is not None and pins.replicas % len(replicas):
            return None
        if pins.every_island and islands != {p.island for p in view}:
            return None
        apart = combinations(replicas, 2)
        if not all(links.can_talk(a, b) for one, other in apart for a in one for b in other):
            return None
        clones = 1 if pins.replicas is None else pins.replicas // len(replicas)
        return Grouping(replicas, clones, self.problem.samples / sum(self.pipelines.samples_per_s(p) for p in used))


def _kind(pool: Pool) -> tuple[object, ...]:
    return -pool.rates.flops_per_s, pool.device_class, pool.speed, pool.rates.memory_bytes, pool.size


class _Descent:
    """Pools moved between groups for as long as that makes an estimate of the step shorter."""

    def __init__(
        self,
        problem: Problem,
        pipelines: Pipelines,
        view: Sequence[Pool],
        grouping: Callable[[Sequence[Pool], Groups], Grouping | None],
    ) -> None:
        self.problem, self.pipelines, self.view, self.grouping = problem, pipelines, view, grouping
        self.speeds = [pipelines.samples_per_s(pool) for pool in view]
        self._known: dict[tuple[frozenset[int], bool], float] = {}
        self._seen: dict[Groups, tuple[int, float]] = {}

    def likely(self) -> list[list[list[int]]]:
        """The groups with the least estimates that were come by, from all apart and from all together."""
        every = range(len(self.view))
        for start in (Groups(frozenset((i,)) for i in every), Groups((frozenset(every),))):
            self._descend(start)
        fit = sorted((rank, sorted(map(sorted, groups))) for groups, rank in self._seen.items() if rank[0] == 0)
        return [groups for _, groups in fit[:MOST]]

    def _descend(self, at: Groups) -> None:
        rank = self._rank(at)
        while True:
            near = min((self._rank(groups), sorted(map(sorted, groups)), groups) for groups in self._near(at))
            if near[0] >= rank:
                return
            rank, at = near[0], near[2]

    def _near(self, groups: Groups) -> Iterator[Groups]:
        """All that differ in the place of one pool."""
        for pool in range(len(self.view)):
            home = next((g for g in groups if pool in g), frozenset[int]())
            left = groups - {home} | ({home - {pool}} if len(home) > 1 else frozenset())
            for group in left:
                yield left - {group} | {group | {pool}}
            if len(home) != 1:
                yield left | {frozenset((pool,))}
            if home and left:
                yield left

    def _rank(self, groups: Groups) -> tuple[int, float]:
        """(groups that do not fit, estimated seconds of the slowest of the others)."""
        if groups not in self._seen:
            if self.grouping(self.view, groups) is None:
                self._seen[groups] = (len(self.view) + 1, math.inf)
            else:
                idle = sum(self.speeds) / sum(self.speeds[i] for group in groups for i in group)
                seconds = [self._seconds(group, alone=len(groups) == 1) * idle for group in groups]
                fit = [s for s in seconds if s < math.inf]
                self._seen[groups] = (len(seconds) - len(fit), max(fit, default=math.inf))
        return self._seen[groups]

    def _seconds(self, group: frozenset[int], *, alone: bool) -> float:
        """Of a group with its share of the samples by speed, were all pools used."""
        if (group, alone) not in self._known:
            pools, others = (
                tuple(p for i, p in enumerate(self.view) if (i in group) is there) for there in (True, False)
            )
            share = self.problem.samples * sum(self.speeds[i] for i in group) / sum(self.speeds)
            sync = None if alone or not others else slowest_sync(self.problem.links, (pools, others), 0)
            pinned = self.problem.micro_batch_size
            sizes = [s for s in SIZES if s <= max(share, 1)] if pinned is None else [pinned]
            sums = 0.0 if sync is None else sums_seconds(self.problem.costs, pools, sync, 2)
            beats = {size: self._with(pools, size, max(1, round(share / size)), sync) for size in sizes}
            seconds = [beat * share / size + unhidden(self.problem.costs, sums, beat) for size, beat in beats.items()]
            self._known[group, alone] = min(seconds)
        return self._known[group, alone]

    def _with(self, pools: tuple[Pool, ...], size: int, count: int, sync: SyncRate | None) -> float:
        """Seconds a micro-batch."""
        batching = Batching(size, count, 1 if sync is None else 2, sync)
        return self.pipelines.bound(WantedPipeline(pools, batching), math.inf) / count


def sums_seconds(costs: LayerCosts, pools: Sequence[Pool], sync: SyncRate, replicas: int) -> float:
    """Of a replica's gradient sums with others at least, if all its devices hold equal parts of the model."""
    rate = min(sync.per_rank * sum(p.size for p in pools), sync.per_host * sum(len(p.hosts) for p in pools))
    parameters = costs.trained_on(1) * costs.shape.layers
    return (replicas - 1) / replicas * parameters * costs.value_bytes.exchanged / rate


def unhidden(costs: LayerCosts, sums: float, beat: float) -> float:
    """Of seconds of sums what a micro-batch's cannot hide: its forward hides weights that come back."""
    return max(0.0, sums - (beat if costs.value_bytes.over_replicas else BACKWARD * beat))


def slowest_sync(links: LinkRates, replicas: Sequence[Sequence[Pool]], index: int) -> SyncRate:
    """How fast the ranks of a replica can exchange with the others, by the slowest of what joins them."""
    others = [p for i, pools in enumerate(replicas) for p in pools if i != index]
    rates = [links.sync_rate(a, b) for a in replicas[index] for b in others]
    slowest = SyncRate(*(min(column) for column in zip(*rates, strict=True)))
    return slowest._replace(launching_s=max(rate.launching_s for rate in rates))
