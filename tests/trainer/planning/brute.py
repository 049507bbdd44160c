"""The planner's space enumerated without bounds, dynamic programs or balancing: what the search must equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations, product

from hetctl.trainer.planning.arrange import Batching
from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import slowest_sync
from hetctl.trainer.planning.space import PoolUse, partitions, pool_uses, views
from hetctl.trainer.planning.stages import StageCostCache, StagePlace, share
from hetctl.trainer.schedule import SCHEDULES


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
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self) -> float:
        """The least step time of all plans; infinity when nothing fits."""
        best = math.inf
        for view in views(self.problem.pools):
            for groups in partitions(len(view)):
                replicas = [tuple(view[i] for i in group) for group in groups]
                for sizes, counts in self._batchings(len(replicas)):
                    slowest = 0.0
                    for index, (pools, size, count) in enumerate(zip(replicas, sizes, counts, strict=True)):
                        sync = slowest_sync(self.problem.links, replicas, index) if len(replicas) > 1 else None
                        batching = Batching(size, count, len(replicas), sync)
                        slowest = max(slowest, self.pipeline(pools, batching))
                        if slowest >= best:
                            break
                    best = min(best, slowest)
        return best

    def _batchings(self, replicas: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        total = self.problem.samples
        for one in range(1, total + 1):
            if total % one == 0:
                for shares in compositions(total // one, replicas):
                    yield shares, (one,) * replicas
                    yield (one,) * replicas, shares

    def pipeline(self, pools: Sequence[Pool], batching: Batching) -> float:
        """The least time of one replica on these pools."""
        key = (tuple(pools), batching)
        if key not in self._known:
            layers, size = self.problem.costs.shape.layers, batching.micro_batch_size
            options = [
                pool_uses(p, layers=layers, micro_batch_size=size, pins=self.problem.pins, tensors=self.problem.tensors)
                for p in pools
            ]
            self._known[key] = min(
                (
                    self.arrangement(order, batching, schedule)
                    for uses in product(*options)
                    if sum(u.stages for u in uses) <= layers
                    for order in permutations(uses)
                    for schedule in ("1f1b", "eager-1f1b")
                    if schedule == "1f1b" or len({u.pool.island for u in uses}) > 1
                ),
                default=math.inf,
            )
        return self._known[key]

    def arrangement(self, uses: Sequence[PoolUse], batching: Batching, schedule: str) -> float:
        stages = [use for use in uses for _ in range(use.stages)]
        count, size = batching.micro_batches, batching.micro_batch_size
        ahead = SCHEDULES[schedule].in_flight(len(stages), count)
        payload = self.problem.costs.boundary_bytes(size)
        hops = [self.problem.links.hop_seconds(a, b, payload) for a, b in pairwise(stages)]
        tables = []
        for i, use in enumerate(stages):
            covered = min(ahead[i], count)
            turns = ahead[i] < count
            ratio = (len(stages) - i) / ahead[i] if turns else 1.0
            wait = 2 * sum(hops[i:]) / ahead[i] if turns else 0.0
            place = StagePlace(
                i == 0,
                i == len(stages) - 1,
                share(size, use.width),
                covered,
                ratio,
                wait,
                batching.sync,
                batching.replicas,
            )
            tables.append(self.stage_costs.of(use.site, place).table)
        best = math.inf
        for layers in compositions(self.problem.costs.shape.layers, len(stages)):
            ways = [
                [
                    (t.beat[r, k], (count - 1) * max(t.beat[r, k], t.ratio * t.beat[r, k] + t.wait) + t.end[r, k])
                    for r in range(len(t.beat))
                    if t.beat[r, k] < math.inf
                ]
                for t, k in zip(tables, layers, strict=True)
            ]
            for way in product(*ways):
                slowest = max((count - 1) * max(hops, default=0.0), *(load for _, load in way), 0.0)
                best = min(best, sum(beat for beat, _ in way) + slowest)
        return best + 2 * sum(hops)
