"""The search: every grouping of pools into replicas, every use of a pool, pruned only by lower bounds on time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from hetctl.trainer.arrange import Batching, Pipeline, arrange, schedules
from hetctl.trainer.batching import balance, divisors
from hetctl.trainer.bounds import UseBound, lower_bounds, use_bound
from hetctl.trainer.partition import Floats, Whole
from hetctl.trainer.pools import Pool
from hetctl.trainer.problem import Problem
from hetctl.trainer.space import PoolUse, orders, partitions, pool_uses, views
from hetctl.trainer.stages import StageBook

COMBINATIONS = 120_000  # bounded at once; beyond, the grid of uses is thinned, and said so
LEVELS = ("every use", "one tensor degree per pipeline", "few stage counts", "stage counts of powers of two")
FEW_STAGES = frozenset((1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32))
POWERS = frozenset((1, 2, 4, 8, 16, 32, 64))
SAME = 1e-9  # relative: times closer than this are equal


Batch = Callable[[int], tuple[int, int]]  # a replica's part -> (micro-batch size, micro-batches)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A whole arrangement: one pipeline per replica; each stands for `clones` equal, narrower ones."""

    pipelines: tuple[Pipeline, ...]
    seconds: float
    clones: int = 1
    handicap: float = 1.0  # what the seconds are multiplied with when candidates are compared

    @property
    def rank(self) -> float:
        return self.seconds * self.handicap

    @property
    def arrangement(self) -> tuple[object, ...]:
        return tuple(p.arrangement for p in self.pipelines)


@dataclass
class Found:
    """What a search came to: candidates fastest first, how much it looked at, and how fine its grid was."""

    candidates: list[Candidate] = field(default_factory=list)
    bounded: int = 0
    exact: int = 0
    level: int = 0


@dataclass(frozen=True)
class Grouping:
    """Pools gathered into replicas, with a bound on the step time from their speeds alone."""

    replicas: tuple[tuple[Pool, ...], ...]
    clones: int
    bound: float


class Search:
    """One run over a problem; keeps the `keep` fastest distinct arrangements."""

    def __init__(self, problem: Problem, *, keep: int = 6) -> None:
        self.problem, self.keep = problem, keep
        self.book = StageBook(problem.costs, problem.means)
        self.found = Found()
        self._known: dict[tuple[tuple[Pool, ...], Batching, int], tuple[float, Pipeline | None]] = {}
        self._bounds: dict[tuple[PoolUse, Batching], UseBound | None] = {}
        self._order: dict[tuple[Pool, ...], list[tuple[int, ...]]] = {}

    def run(self) -> Found:
        """Search everything; `candidates` stays empty when nothing fits."""
        for grouping in sorted(self._groupings(), key=lambda g: g.bound):
            if grouping.bound >= self.limit:
                break
            if len(grouping.replicas) == 1:
                self._alone(grouping)
            else:
                self._together(grouping)
        return self.found

    @property
    def limit(self) -> float:
        """Only what is faster than this is still of interest."""
        found = self.found.candidates
        return found[-1].rank if len(found) >= self.keep else math.inf

    def _offer(self, candidate: Candidate) -> None:
        """Keep the fastest, one per arrangement; of equal times the earlier stays first."""
        kept = self.found.candidates
        for index, other in enumerate(kept):
            if other.arrangement == candidate.arrangement:
                if other.rank <= candidate.rank * (1 + SAME):
                    return
                del kept[index]
                break
        place = next((i for i, c in enumerate(kept) if candidate.rank < c.rank * (1 - SAME)), len(kept))
        kept.insert(place, candidate)
        del kept[self.keep :]

    def _groupings(self) -> Iterator[Grouping]:
        pins = self.problem.pins
        for view in views(self.problem.pools):
            speed = {id(pool): self._speed(pool) for pool in view}
            for groups in partitions(len(view)):
                if pins.order is not None and (
                    len(groups) > 1 or {view[i].island for i in groups[0]} != set(pins.order)
                ):
                    continue
                if pins.replicas is not None and pins.replicas % len(groups):
                    continue
                if pins.every_island and {view[i].island for g in groups for i in g} != {p.island for p in view}:
                    continue
                replicas = tuple(tuple(view[i] for i in group) for group in groups)
                clones = 1 if pins.replicas is None else pins.replicas // len(groups)
                used = [pool for pools in replicas for pool in pools]
                if len(replicas) > 1 and not self._all_talk(replicas):
                    continue
                yield Grouping(replicas, clones, self.problem.samples / sum(speed[id(p)] for p in used))

    def _all_talk(self, replicas: Sequence[Sequence[Pool]]) -> bool:
        lanes = self.problem.lanes
        return all(
            lanes.can_talk(a, b)
            for i, one in enumerate(replicas)
            for other in replicas[i + 1 :]
            for a in one
            for b in other
        )

    def _speed(self, pool: Pool) -> float:
        """Samples per second that a pool could at most contribute, on whole models."""
        costs = self.problem.costs
        best = 0.0
        for samples in {*range(1, min(64, self.problem.samples) + 1), *divisors(self.problem.samples)}:
            block = costs.block(pool.rates, samples).both
            best = max(best, samples / (costs.shape.layers * block + costs.head(pool.rates, samples).both))
        return best * pool.size

    def _alone(self, grouping: Grouping) -> None:
        """One replica: every micro-batch size, most promising first."""
        total, pinned = self.problem.samples, self.problem.micro_batch_size
        sizes = divisors(total) if pinned is None else [pinned]
        batchings = [Batching(s, total // s) for s in sizes if s % grouping.clones == 0]
        looks = [(self._bounded(grouping.replicas[0], b, grouping.clones), b) for b in batchings]
        looks.sort(key=lambda look: look[0].bound)
        for look, batching in looks:
            for pipeline in self._exact(grouping.replicas[0], batching, look, lambda: self.limit):
                self._offer(Candidate((pipeline,), pipeline.seconds, grouping.clones))

    def _together(self, grouping: Grouping) -> None:
        """Several replicas: equal counts with unequal sizes first, then equal sizes with unequal counts."""
        total, pinned = self.problem.samples, self.problem.micro_batch_size
        weights = [sum(self._speed(p) for p in pools) for pools in grouping.replicas]
        if pinned is None:
            for count in divisors(total):
                self._balanced(grouping, weights, total // count, _sizes(count))
        for size in divisors(total) if pinned is None else [pinned]:
            self._balanced(grouping, weights, total // size, _counts(size))

    def _balanced(self, grouping: Grouping, weights: Sequence[float], total: int, batch: Batch) -> None:
        """Offer the grouping with `total` shared so that its slowest replica is fastest; `batch` says of what."""
        replicas, clones = grouping.replicas, grouping.clones
        rates = [self._sync_rate(replicas, i) for i in range(len(replicas))]
        if total < len(replicas):
            return

        def pipeline(index: int, part: int) -> Pipeline | None:
            size, count = batch(part)
            if size % clones:
                return None
            batching = Batching(size, count, len(replicas), rates[index])
            return self._fastest(replicas[index], batching, clones)

        def seconds(index: int, part: int) -> float:
            found = pipeline(index, part)
            return math.inf if found is None else found.seconds

        shares = balance(total, weights, seconds, limit=self.limit / self.problem.across)
        if shares is not None:
            chosen = [pipeline(i, part) for i, part in enumerate(shares[0])]
            pipelines = tuple(p for p in chosen if p is not None)
            islands = {u.pool.island for p in pipelines for u in p.uses}
            handicap = self.problem.across if len(islands) > 1 else 1.0
            self._offer(Candidate(pipelines, shares[1], clones, handicap))

    def _sync_rate(self, replicas: Sequence[Sequence[Pool]], index: int) -> float:
        others = [p for i, pools in enumerate(replicas) for p in pools if i != index]
        return min(self.problem.lanes.sync_rate(a, b) for a in replicas[index] for b in others)

    def _fastest(self, pools: tuple[Pool, ...], batching: Batching, clones: int) -> Pipeline | None:
        """The fastest pipeline of these pools; None when none is faster than the limit."""
        key = (pools, batching, clones)
        limit, known = self._known.get(key, (-1.0, None))
        if known is not None or limit >= self.limit:
            return known
        best: Pipeline | None = None

        def below() -> float:
            return self.limit if best is None else best.seconds

        for found in self._exact(pools, batching, self._bounded(pools, batching, clones), below):
            best = found
        self._known[key] = (self.limit, best)
        return best

    def _bounded(self, pools: tuple[Pool, ...], batching: Batching, clones: int) -> Look:
        """Every combination of uses that might fit and beat the limit, with its bound."""
        pins, layers = self.problem.pins, self.problem.costs.shape.layers
        look = Look()
        for options in self._options(pools, batching, clones):
            if not all(options):
                continue
            combos, bounds = lower_bounds(options, layers, micro_batches=batching.micro_batches, stages=pins.stages)
            self.found.bounded += len(bounds)
            near = int(np.searchsorted(bounds, self.limit))
            if near:
                look.parts.append((options, combos[:near], bounds[:near]))
        return look

    def _options(self, pools: tuple[Pool, ...], batching: Batching, clones: int) -> Iterator[list[list[UseBound]]]:
        """Options per pool, in sets whose product is to be searched; the grid is thinned until that is possible."""
        every = [self._uses(pool, batching, clones) for pool in pools]
        for level in range(len(LEVELS)):
            sets = _thinned(every, level)
            if level == len(LEVELS) - 1 or sum(math.prod(map(len, s)) for s in sets) <= COMBINATIONS:
                self.found.level = max(self.found.level, level)
                for options in sets:
                    yield [list(filter(None, (self._use_bound(u, batching) for u in uses))) for uses in options]
                return

    def _uses(self, pool: Pool, batching: Batching, clones: int) -> list[PoolUse]:
        problem, size = self.problem, batching.micro_batch_size
        layers = problem.costs.shape.layers
        uses = pool_uses(pool, layers=layers, micro_batch_size=size, pins=problem.pins, tensors=problem.tensors)
        return [replace(u, copies=clones) for u in uses if u.width % clones == 0]

    def _use_bound(self, use: PoolUse, batching: Batching) -> UseBound | None:
        key = (use, batching)
        if key not in self._bounds:
            self._bounds[key] = use_bound(self.problem, self.book, use, batching)
        return self._bounds[key]

    def _exact(
        self, pools: tuple[Pool, ...], batching: Batching, look: Look, limit: Callable[[], float]
    ) -> Iterator[Pipeline]:
        """Pipelines faster than the limit as it stands, until no bound is below it."""
        for bound, uses in look:
            if bound >= limit():
                return
            for order in self._orders(pools):
                ordered = tuple(uses[i] for i in order)
                for schedule in schedules(self.problem, ordered):
                    self.found.exact += 1
                    made = arrange(self.problem, self.book, ordered, batching, schedule=schedule, bound=limit())
                    if made is not None:
                        yield made

    def _orders(self, pools: tuple[Pool, ...]) -> list[tuple[int, ...]]:
        if pools not in self._order:
            lanes = self.problem.lanes
            found = orders(pools, self.problem.pins, alike=lanes.alike(pools))
            self._order[pools] = [o for o in found if all(lanes.can_talk(pools[a], pools[b]) for a, b in pairwise(o))]
        return self._order[pools]


def _in_order(view: Sequence[Pool], groups: Sequence[Sequence[int]], order: Sequence[str]) -> bool:
    """Whether all islands of a pinned order, and no others, are in one pipeline, with all their pools."""
    used = groups[0]
    return len(groups) == 1 and set(used) == {i for i, pool in enumerate(view) if pool.island in order}


def _sizes(count: int) -> Batch:
    return lambda part: (part, count)


def _counts(size: int) -> Batch:
    return lambda part: (size, part)


class Look:
    """Combinations of uses with their bounds, most promising first."""

    def __init__(self) -> None:
        self.parts: list[tuple[list[list[UseBound]], Whole, Floats]] = []

    @property
    def bound(self) -> float:
        """The least bound of all; infinity when there is none."""
        return min((float(bounds[0]) for _, _, bounds in self.parts), default=math.inf)

    def __iter__(self) -> Iterator[tuple[float, tuple[PoolUse, ...]]]:
        return heapq.merge(*map(self._walk, self.parts), key=lambda found: found[0])

    @staticmethod
    def _walk(part: tuple[list[list[UseBound]], Whole, Floats]) -> Iterator[tuple[float, tuple[PoolUse, ...]]]:
        options, combos, bounds = part
        for combo, bound in zip(combos, bounds, strict=True):
            yield float(bound), tuple(o[i].use for o, i in zip(options, combo, strict=True))


def _thinned(every: Sequence[list[PoolUse]], level: int) -> list[list[list[PoolUse]]]:
    """Sets of options per pool at a level of LEVELS; each set's product is searched."""
    if level == 0:
        return [list(every)]
    counts = {1: None, 2: FEW_STAGES, 3: POWERS}[level]
    tensors = sorted({u.tensor for uses in every for u in uses})
    sets = []
    for tensor in tensors:
        options = [[u for u in uses if u.tensor == tensor and (counts is None or u.stages in counts)] for uses in every]
        if level == 3:
            options = [_widest(uses) for uses in options]
        sets.append(options)
    return sets


def _widest(uses: Sequence[PoolUse]) -> list[PoolUse]:
    found: dict[int, PoolUse] = {}
    for use in uses:
        if use.stages not in found or use.width > found[use.stages].width:
            found[use.stages] = use
    return list(found.values())
