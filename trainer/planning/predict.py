"""What a candidate is expected to do: simulated step time, shares, memory, and efficiency against the islands alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import Candidate, Search
from hetctl.trainer.planning.simulate import Simulated, busy_seconds, simulate
from hetctl.trainer.planning.space import Pins


@dataclass(frozen=True, eq=False)
class Prediction:
    """A candidate and its simulated step."""

    candidate: Candidate
    simulated: Simulated
    bubble_share: float  # of the used devices' time, waiting for neighbours that compute
    bridge_share: float  # of the step, gone if transfers between islands took no time

    @property
    def seconds(self) -> float:
        return self.simulated.step_time_s


def predict(candidate: Candidate) -> Prediction:
    """Simulate a candidate, and once more with bridges that take no time."""
    times = [p.times for p in candidate.pipelines]
    made = simulate(times)
    bridged = any(any(t.bridged) for t in times)
    ideal = simulate([t.without_bridges() for t in times]) if bridged else made
    step = made.step_time_s
    bridge = max(0.0, (step - ideal.step_time_s) / step)
    if len(candidate.pipelines) > 1:
        synced = sum(s.end_s - s.start_s for s in made.spans if s.kind == "sync")
        stages = sum(len(p.layers) for p in candidate.pipelines)
        bridge += synced / stages / step
    return Prediction(candidate, made, max(0.0, _waiting(candidate, made) - bridge), bridge)


def _waiting(candidate: Candidate, made: Simulated) -> float:
    """Share of the used devices' time in which they do not compute."""
    busy, total, seconds = 0.0, 0.0, busy_seconds(made.spans)
    for number, index, stage in candidate.stages:
        ranks = len(stage.ranks)
        busy += ranks * seconds.get((number, index), 0.0)
        total += ranks * made.step_time_s / candidate.pipelines[number].chunks
    return 1.0 - busy / total


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
    found = Search(own, keep=1).run().candidates
    return samples / predict(found[0]).seconds if found else None


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
