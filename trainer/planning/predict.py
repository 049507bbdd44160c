"""What a candidate is expected to do: simulated step time, shares, memory, and efficiency against the islands alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.reschedule import under_schedules
from hetctl.trainer.planning.search import Candidate, Search
from hetctl.trainer.planning.simulate import Simulated, busy_seconds, simulate, step_seconds
from hetctl.trainer.planning.space import Pins


@dataclass(frozen=True, eq=False)
class Prediction:
    """A candidate and its simulated step; of most candidates only the seconds are asked."""

    candidate: Candidate

    @cached_property
    def seconds(self) -> float:
        return step_seconds([p.times for p in self.candidate.pipelines], whole=True)

    @cached_property
    def simulated(self) -> Simulated:
        return simulate([p.times for p in self.candidate.pipelines])

    @cached_property
    def bridge_share(self) -> float:
        """Of the step, gone if transfers and sums between islands took no time."""
        ideal = step_seconds([p.times.without_bridges() for p in self.candidate.pipelines], whole=True)
        return max(0.0, (self.seconds - ideal) / self.seconds)

    @cached_property
    def bubble_share(self) -> float:
        """Of the used devices' time, waiting for neighbours that compute."""
        busy, total, seconds = 0.0, 0.0, busy_seconds(self.simulated.spans)
        for number, index, stage in self.candidate.stages:
            ranks = len(stage.ranks)
            busy += ranks * seconds.get((number, index), 0.0)
            total += ranks * self.seconds / self.candidate.pipelines[number].chunks
        return max(0.0, 1.0 - busy / total - self.bridge_share)


def alone_samples_per_s(problem: Problem, island: str) -> float | None:
    """Samples per second of an island's own best plan at the same work per device; None when it cannot train alone."""
    pools = tuple(p for p in problem.pools if p.island == island)
    devices = sum(p.size for p in pools)
    every = sum(p.size for p in problem.pools)
    samples = devices * max(1, problem.samples // every)
    own = dataclasses.replace(
        problem,
        pools=pools,
        samples=samples,
        pins=Pins(),
        micro_batch_size=None,
        schedules=Problem.schedules,
        forwards_ahead=None,
        layers=None,
        split="auto",
    )
    found = fastest(own)
    return samples / found.seconds if found else None


def fastest(problem: Problem) -> Prediction | None:
    """What a problem comes to, where only that is asked for: its best arrangement under every schedule. None: nothing
    fits."""
    made = under_schedules(problem, Search(problem, keep=1).run().candidates)
    return Prediction(min(made, key=lambda c: c.step_s)) if made else None


def bound_samples_per_s(problem: Problem) -> float:
    """Samples per second if every device computed all the time at its own speed: no bubbles, no transfers."""
    costs = problem.costs
    total = 0.0
    for pool in problem.pools:
        many = 64
        block, head = costs.block(pool.rates, many).both, costs.head(pool.rates, many).both
        total += pool.size * many / (costs.shape.layers * block + head)
    return total


def mfu(problem: Problem, seconds: float) -> float | None:
    """Model FLOPs per second over the peak of every device, used or not; None where a peak is unknown."""
    if not all(p.rates.peak_flops_per_s for p in problem.pools):
        return None
    peak = math.fsum(p.size * p.rates.peak_flops_per_s for p in problem.pools)
    flops = problem.costs.shape.token_flops(problem.costs.seq_len) * problem.costs.seq_len * problem.samples
    return flops / seconds / peak
