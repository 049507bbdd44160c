"""The fastest pipeline of given pools at given micro-batches: bounds first, then the exact split of what they leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, pairwise
from operator import attrgetter
from typing import TypeVar

import numpy as np

from hetctl.trainer.planning.arrange import Arrangement, Batching, Pipeline, deeper, hiding_all, searched_schedules
from hetctl.trainer.planning.batching import divisors
from hetctl.trainer.planning.bounds import UseBound, UseBounds, lower_bounds
from hetctl.trainer.planning.likely_uses import likely_uses
from hetctl.trainer.planning.partition import Floats, Whole
from hetctl.trainer.planning.pools import Pool, Rates
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.simulate import least_seconds, step_seconds
from hetctl.trainer.planning.space import MANY_POOLS, PoolUse, orders, pool_uses
from hetctl.trainer.planning.stages import StageCostCache, share
from hetctl.trainer.schedule import SCHEDULES, Schedule

COMBINATIONS = 100_000  # bounded one by one; of more only the likely ones are looked at
SLACK = 1.1  # how much slower the closed form may take an arrangement for than it is, to be looked at all the same
FEW, FEW_SLACK = 4, 1.2  # of so few micro-batches: that some stages never wait for the last ones counts for more
NEAR = 1.1  # what takes less than so many times what is looked for may come below it by moving layers
WORTH_DEEPER = 5e-3  # relative gain, for which more is held
LARGE_SLACK = 1.02  # in larger searches
LIKELY = 6  # combinations whose split is worked out, of one pipeline and batch; smaller searches look at all
FEW_COMBINATIONS = 5_000  # of many pools
DEEP = SCHEDULES["eager-1f1b"]
FROM_FEW, FROM_ALL = (replace(DEEP, in_flight=SCHEDULES[name].in_flight) for name in ("1f1b", "gpipe"))
Found = TypeVar("Found")


@dataclass(frozen=True)
class WantedPipeline:
    """A replica to be found: pools (order free), micro-batches, and how many equal replicas it stands for."""

    pools: tuple[Pool, ...]
    batching: Batching
    clones: int = 1


@dataclass
class _Known:
    lower: float = 0.0  # no pipeline takes less
    best: Pipeline | None = None
    exact: bool = False  # `best` is the fastest there is


class Pipelines:
    """Finds pipelines and remembers what it found.

    `like` knows the same problem at other prices between replicas: bounds leave these out, so what it has serves again.
    """

    def __init__(self, problem: Problem, *, like: Pipelines | None = None) -> None:
        self.problem = problem
        self.stage_costs = StageCostCache(problem.costs, problem.modes)
        self.use_bounds: UseBounds = like.use_bounds if like else UseBounds(problem)
        self.tried = 0
        self.thinned: bool = like is not None and like.thinned
        self.near = 1.0 if problem.tolerance else NEAR
        self.most_tried = LIKELY if problem.tolerance else None
        self._known: dict[WantedPipeline, _Known] = {}
        self._uses: Callable[[Pool, int, int], list[PoolUse]] = like._uses if like else cache(self._new_uses)
        self._orders = cache(self._new_orders)
        self._block_seconds = cache(self._new_block_seconds)
        self.samples_per_s: Callable[[Pool], float] = like.samples_per_s if like else cache(self._new_samples_per_s)
        self._combinations: dict[tuple[tuple[Pool, ...], int, int, int], BoundedCombinations] = (
            like._combinations if like else {}
        )

    def _new_samples_per_s(self, pool: Pool) -> float:
        """What a pool could at most contribute, on whole models."""
        costs, samples = self.problem.costs, self.problem.samples
        best = 0.0
        for n in {*range(1, min(64, samples) + 1), *divisors(samples)}:
            block = costs.block(pool.rates, n).both
            best = max(best, n / (costs.shape.layers * block + costs.head(pool.rates, n).both))
        return best * pool.size

    def bound(self, wanted: WantedPipeline, limit: float) -> float:
        """A lower bound on the time, at most `limit` where that is all that matters."""
        known = self._known.setdefault(wanted, _Known())
        if known.lower < limit:
            known.lower = max(known.lower, min(self.combinations(wanted, limit).bound, limit))
        return known.lower

    def faster(self, wanted: WantedPipeline, limit: float) -> bool:
        """Whether some pipeline takes less than `limit`."""
        known = self._known.setdefault(wanted, _Known())
        if known.best is not None and known.best.seconds < limit:
            return True
        if known.exact or self.bound(wanted, limit) >= limit:
            return False
        for found in self.exact(wanted, self.combinations(wanted, limit), lambda: limit):
            known.best = found
            return True
        known.lower = limit
        return False

    def fastest(self, wanted: WantedPipeline, limit: float) -> Pipeline | None:
        """The fastest pipeline, if it takes less than `limit`."""
        known = self._known.setdefault(wanted, _Known())
        if not known.exact and known.lower < limit:

            def below() -> float:
                return limit if known.best is None else min(limit, known.best.seconds)

            for found in self.exact(wanted, self.combinations(wanted, below()), below):
                known.best = found
            known.exact = known.best is not None and known.best.seconds < limit
            known.lower = limit if not known.exact else known.lower
        return known.best if known.best is not None and known.best.seconds < limit else None

    def alike(self, wanted: WantedPipeline, found: WantedPipeline) -> float:
        """Seconds of these micro-batches in the fastest pipeline of others; infinity where they do not fit there."""
        best = self._known[found].best
        made = None if best is None else self.again(best, wanted.batching)
        return math.inf if made is None else made.seconds

    def again(self, pipeline: Pipeline, batching: Batching) -> Pipeline | None:
        """The same uses in the same order with these micro-batches; None where they do not fit."""
        if batching.micro_batch_size < max(use.width for use in pipeline.uses):
            return None
        return self._arranged(pipeline.uses, batching, SCHEDULES[pipeline.schedule]).best()

    def combinations(self, wanted: WantedPipeline, limit: float) -> BoundedCombinations:
        """Every combination of uses that might fit and beat the limit, with its bound.

        Bounds are of the closed form, which takes some arrangements for up to `_slack` slower than they are. They leave
        out what replicas exchange, so these serve every grouping.
        """
        key = (wanted.pools, wanted.batching.micro_batch_size, wanted.batching.micro_batches, wanted.clones)
        seen = self._combinations.get(key)
        if seen is not None and (limit <= seen.limit or seen.limit == math.inf):
            return seen
        found = self._combinations[key] = self._bounded_combinations(wanted, limit)
        return found

    def _bounded_combinations(self, wanted: WantedPipeline, limit: float) -> BoundedCombinations:
        batching, slack = wanted.batching, self._slack(wanted.batching)
        most = limit * slack
        every = [self._uses(p, batching.micro_batch_size, wanted.clones) for p in wanted.pools]
        near = self._near(every, wanted, most)
        options = self.use_bounds.of(near, batching, waits=self._waits(wanted))
        if not all(options):
            return BoundedCombinations(limit, [], np.zeros((0, 0), dtype=np.int64), np.zeros(0))
        many = math.prod(map(len, options)) > (COMBINATIONS if len(options) < MANY_POOLS else FEW_COMBINATIONS)
        self.thinned |= many
        every_one = partial(lower_bounds, micro_batches=batching.micro_batches, most=self.most_tried)
        combos, bounds = (likely_uses if many else every_one)(
            options, self.problem.costs.shape.layers, stages=self.problem.pins.stages, limit=most
        )
        return BoundedCombinations(limit, options, combos, bounds / slack)

    def _slack(self, batching: Batching) -> float:
        if self.problem.tolerance:
            return LARGE_SLACK
        return FEW_SLACK if batching.micro_batches <= FEW else SLACK

    def _near(self, options: list[list[PoolUse]], wanted: WantedPipeline, limit: float) -> list[list[PoolUse]]:
        """Uses that could be part of something below the limit, were all others at their best and memory no matter.

        A pipeline takes at least the fill of its stages, and (m - 1) times all layers over the layers per second
        of all stages together.
        """
        if limit == math.inf:
            return options
        further, layers = wanted.batching.micro_batches - 1, self.problem.costs.shape.layers
        size = wanted.batching.micro_batch_size
        beats = [[self._block_seconds(u.pool.rates, u.tensor, share(size, u.width)) for u in uses] for uses in options]
        flows = [
            [u.stages / t for u, t in zip(uses, times, strict=True)] for uses, times in zip(options, beats, strict=True)
        ]
        most = [max(flow, default=0.0) for flow in flows]
        fastest = min((min(times) for times in beats if times), default=0.0)
        near = []
        for index, uses in enumerate(options):
            others = sum(most) - most[index]
            kept = []
            for use, time, flow in zip(uses, beats[index], flows[index], strict=True):
                fill = use.stages * time + (layers - use.stages) * fastest
                if fill + further * layers / (flow + others) < limit:
                    kept.append(use)
            near.append(kept)
        return near

    def _new_block_seconds(self, rates: Rates, tensor: int, samples: int) -> float:
        return self.problem.costs.block(rates, samples, tensor=tensor).both

    def _new_uses(self, pool: Pool, size: int, clones: int) -> list[PoolUse]:
        problem, layers = self.problem, self.problem.costs.shape.layers
        uses = pool_uses(pool, layers=layers, micro_batch_size=size, pins=problem.pins, tensors=problem.tensors)
        if clones > 1:
            return [replace(u, copies=clones) for u in uses if u.width % clones == 0]
        return uses

    def _waits(self, wanted: WantedPipeline) -> bool:
        """Whether no schedule that will be tried hides transfers."""
        waits = not any(s.hides_transfers for s in searched_schedules(self.problem))
        # in a pipeline deeper than its micro-batches are many nothing waits
        waits &= self.problem.forwards_ahead is None
        return waits and wanted.batching.micro_batches > self.problem.costs.shape.layers

    def exact(
        self, wanted: WantedPipeline, combinations: BoundedCombinations, limit: Callable[[], float]
    ) -> Iterator[Pipeline]:
        """Pipelines faster than the limit as it stands, until no bound is below it."""
        tried, slack = searched_schedules(self.problem), self._slack(wanted.batching)
        starts = [FROM_FEW, DEEP] if tried == [DEEP] else tried  # as where 1F1B is looked at as well
        for bound, found in islice(combinations, self.most_tried):
            if bound >= limit():
                return
            for order in self._orders(wanted.pools):
                if bound + self._order_adds([found[i] for i in order], wanted.batching) / slack >= limit():
                    continue
                ordered = tuple(found[i].use for i in order)
                for schedule in starts if sum(u.stages for u in ordered) > 1 else starts[:1]:
                    little = schedule.hides_transfers and len(tried) > 1  # an asked one is tried whatever it gains
                    if little and self._waits_little(ordered, wanted.batching, limit()):
                        continue
                    self.tried += 1
                    made = self._found(self._arranged(ordered, wanted.batching, schedule), limit(), slack)
                    if made is not None and made.seconds < limit():
                        yield made

    def _found(self, arrangement: Arrangement, limit: float, slack: float) -> Pipeline | None:
        """The arrangement's fastest pipeline, worked on where that may bring it below the limit; None where nothing
        would."""
        made, small = arrangement.best(bound=limit * slack), self.near > 1.0
        if made is None:
            return self._hidden(arrangement, limit * slack) if small and arrangement.schedule == DEEP else None
        if least_seconds(made.times) >= limit * self.near:
            return None
        return (
            self._deeper(self._improved(arrangement, made))
            if small and self._could_be(made, limit * self.near)
            else made
        )

    def _arranged(
        self, uses: tuple[PoolUse, ...], batching: Batching, schedule: Schedule, ahead: tuple[int, ...] | None = None
    ) -> Arrangement:
        return Arrangement(self.problem, self.stage_costs, uses, batching, schedule, ahead)

    def _could_be(self, pipeline: Pipeline, limit: float) -> bool:
        """Whether a pipeline takes less than a limit, or would with as many in flight as hide all."""
        if pipeline.seconds < limit:
            return True
        return step_seconds([replace(pipeline.times, forwards_ahead=hiding_all(pipeline.times))]) < limit

    def _order_adds(self, found: Sequence[UseBound], batching: Batching) -> float:
        """Seconds that an order of uses adds to what bounds any: hops between pools, and who holds which end."""
        payload = self.problem.costs.hop_bytes(batching.micro_batch_size)
        hops = sum(self.problem.links.hops([f.use for f in found], payload))
        ends = found[0].embedding - min(f.embedding for f in found) + found[-1].head - min(f.head for f in found)
        return 2 * hops + ends

    def improved(self, pipeline: Pipeline) -> Pipeline:
        """With layers moved between its stages, and more forwards in flight, where that shortens the simulated step;
        what is asked for stays."""
        schedule = SCHEDULES[pipeline.schedule]
        held = self._arranged(pipeline.uses, pipeline.batching, schedule, pipeline.forwards_ahead)
        return self._deeper(self._improved(held, pipeline))

    def _deeper(self, pipeline: Pipeline) -> Pipeline:
        """With ever more forwards in flight, where transfers are long, while that shortens the step and fits."""
        if self.problem.forwards_ahead is not None or DEEP not in searched_schedules(self.problem):
            return pipeline

        def tried(at: Pipeline) -> Iterator[Pipeline | None]:
            return (self.at_depth(at, ahead) for (ahead,) in deeper([at.times]))

        return deepest(pipeline, tried, attrgetter("seconds"))

    def _hidden(self, arrangement: Arrangement, bound: float) -> Pipeline | None:
        """With as many forwards in flight as hide all, from the layers that all of them in flight allow; where they are
        pinned, these arrangements are beyond the bound as well."""
        made = self._arranged(arrangement.uses, arrangement.batching, FROM_ALL).best(bound=bound)
        return made and self.at_depth(made, hiding_all(made.times))

    def at_depth(self, pipeline: Pipeline, ahead: tuple[int, ...]) -> Pipeline | None:
        """Its uses and batching with so many forwards in flight, its layers where they fit; None if nothing does."""
        self.tried += 1
        arrangement = self._arranged(pipeline.uses, pipeline.batching, DEEP, ahead)
        made = arrangement.with_layers(pipeline.layers) or arrangement.best()
        return made and self._improved(arrangement, made)

    def _improved(self, arrangement: Arrangement, pipeline: Pipeline) -> Pipeline:
        asked = self.problem.layers is not None or self.problem.split != "auto"
        return pipeline if asked else arrangement.improved(pipeline)

    def _waits_little(self, uses: Sequence[PoolUse], batching: Batching, limit: float) -> bool:
        """Whether hiding all transfers would gain less than the tolerance."""
        if not self.problem.tolerance:
            return False
        payload = self.problem.costs.hop_bytes(batching.micro_batch_size)
        stages = [use for use in uses for _ in range(use.stages)]
        hops = sum(self.problem.links.hops(stages, payload))
        return 2 * hops / len(stages) * (batching.micro_batches - 1) < self.problem.tolerance * limit

    def _new_orders(self, pools: tuple[Pool, ...]) -> list[tuple[int, ...]]:
        links = self.problem.links
        found = orders(pools, self.problem.pins, alike=links.alike(pools))
        return [o for o in found if all(links.can_talk(pools[a], pools[b]) for a, b in pairwise(o))]


def deepest(found: Found, tried: Callable[[Found], Iterable[Found | None]], seconds: Callable[[Found], float]) -> Found:
    """What is come to by taking the first that takes less by what is worth it, as long as there is one."""
    best: Found | None = found
    while best is not None:
        found, worth = best, seconds(best) * (1 - WORTH_DEEPER)
        best = next((made for made in tried(found) if made is not None and seconds(made) <= worth), None)
    return found


class BoundedCombinations:
    """Combinations of uses with their bounds, most promising first; what takes longer than `limit` was left out."""

    def __init__(self, limit: float, options: Sequence[Sequence[UseBound]], combos: Whole, bounds: Floats) -> None:
        self.limit = limit
        self._options, self._combos, self._bounds = options, combos, bounds

    @property
    def bound(self) -> float:
        """The least bound of all; infinity when there is none."""
        return float(self._bounds[0]) if len(self._bounds) else math.inf

    def __iter__(self) -> Iterator[tuple[float, tuple[UseBound, ...]]]:
        for combo, bound in zip(self._combos, self._bounds, strict=True):
            yield float(bound), tuple(o[i] for o, i in zip(self._options, combo, strict=True))
