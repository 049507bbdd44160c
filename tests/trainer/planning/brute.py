"""The planner's space enumerated without bounds, dynamic programs or balancing: what the search must equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations, product

from hetctl.trainer.planning.arrange import Batching
from hetctl.trainer.planning.groupings import slowest_sync
from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.simulate import PipelineTimes, step_seconds
from hetctl.trainer.planning.space import PoolUse, partitions, pool_uses, views
from hetctl.trainer.planning.stages import StageCostCache, StagePlace, share
from hetctl.trainer.schedule import Schedule


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as a sum of `parts` positive whole numbers."""
    if parts == 1:
        if total >= 1:
            yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


class Brute:
    """Everything there is, the slow way."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stage_costs = StageCostCache(problem.costs, problem.modes)
        self._known: dict[tuple[object, ...], PipelineTimes | None] = {}

    def seconds(self) -> float:
        """The least step time of all plans, simulated; infinity when nothing fits."""
        best = math.inf
        for view in views(self.problem.pools):
            for groups in partitions(len(view)):
                replicas = [tuple(view[i] for i in group) for group in groups]
                for sizes, counts in self._batchings(len(replicas)):
                    times: list[PipelineTimes] = []
                    for index, (pools, size, count) in enumerate(zip(replicas, sizes, counts, strict=True)):
                        sync = slowest_sync(self.problem.links, replicas, index) if len(replicas) > 1 else None
                        found = self.pipeline(pools, Batching(size, count, len(replicas), sync))
                        if found is None:
                            break
                        times.append(found)
                    if len(times) == len(replicas):
                        best = min(best, step_seconds(times))
        return best

    def _batchings(self, replicas: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        total = self.problem.samples
        for one in range(1, total + 1):
            if total % one == 0:
                for shares in compositions(total // one, replicas):
                    yield shares, (one,) * replicas
                    yield (one,) * replicas, shares

    def pipeline(self, pools: Sequence[Pool], batching: Batching) -> PipelineTimes | None:
        """The fastest replica on these pools."""
        key = (tuple(pools), batching)
        if key not in self._known:
            layers, size = self.problem.costs.shape.layers, batching.micro_batch_size
            options = [
                pool_uses(p, layers=layers, micro_batch_size=size, pins=self.problem.pins, tensors=self.problem.tensors)
                for p in pools
            ]
            every = (
                times
                for uses in product(*options)
                if sum(u.stages for u in uses) <= layers
                for order in permutations(uses)
                for schedule in self.problem.schedules
                for times in self.arrangements(order, batching, schedule)
            )
            self._known[key] = min(every, key=lambda times: step_seconds([times]), default=None)
        return self._known[key]

    def arrangements(self, uses: Sequence[PoolUse], batching: Batching, schedule: Schedule) -> Iterator[PipelineTimes]:
        """Every split of the layers, with every way to save memory."""
        stages = [use for use in uses for _ in range(use.stages)]
        count, size = batching.micro_batches, batching.micro_batch_size
        ahead = schedule.in_flight(len(stages), count)
        payload = self.problem.costs.boundary_bytes(size)
        hops = tuple(self.problem.links.hop_seconds(a, b, payload) for a, b in pairwise(stages))
        costs = []
        for i, use in enumerate(stages):
            first, last = i == 0, i == len(stages) - 1
            held = min(ahead[i], count)
            place = StagePlace(
                first, last, share(size, use.width), held, sync=batching.sync, replicas=batching.replicas
            )
            costs.append(self.stage_costs.of(use.site, place))
        for layers in compositions(self.problem.costs.shape.layers, len(stages)):
            ways = [
                [c.way(r).times(k) for r in range(len(c.table.beat)) if c.table.beat[r, k] < math.inf]
                for c, k in zip(costs, layers, strict=True)
            ]
            for way in product(*ways):
                yield PipelineTimes(way, hops, (True,) * len(hops), count, ahead, layers, schedule.name)
