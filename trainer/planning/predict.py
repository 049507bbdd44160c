"""What a candidate is expected to do: simulated step time, shares, memory, and efficiency against the islands alone.

Schedules that the closed form does not know (split backwards, several stages per device) are timed by the simulator
alone, for arrangements that the search has found under 1F1B.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetctl.trainer.model.sample_shares import share as cut
from hetctl.trainer.planning.arrange import Pipeline
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import Candidate, Search
from hetctl.trainer.planning.simulate import PipelineTimes, Simulated, StageTimes, simulate
from hetctl.trainer.planning.space import Pins
from hetctl.trainer.planning.stages import Coefficients, coefficients, share
from hetctl.trainer.schedule import SCHEDULES, Schedule, most_held

WORTH_SAYING = 0.02  # relative gain


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


def predict(problem: Problem, candidate: Candidate) -> Prediction:
    """Simulate a candidate, and once more with bridges that take no time."""
    times = [pipeline_times(problem, p) for p in candidate.pipelines]
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


def stage_coefficients(problem: Problem, pipeline: Pipeline) -> list[Coefficients[float]]:
    """Each stage's costs, linear in its layers."""
    found = []
    uses, batching = pipeline.stage_uses, pipeline.batching
    for index, (use, choice) in enumerate(zip(uses, pipeline.choices, strict=True)):
        held = min(pipeline.forwards_ahead[index], batching.micro_batches)
        place = batching.place(index, len(uses), width=use.width, held=held)
        found.append(coefficients(problem.costs, use.site, place, choice))
    return found


def pipeline_times(problem: Problem, pipeline: Pipeline) -> PipelineTimes:
    """What the simulator needs to know of a pipeline."""
    uses, batching = pipeline.stage_uses, pipeline.batching
    stages = []
    for use, layers, c in zip(uses, pipeline.layers, stage_coefficients(problem, pipeline), strict=True):
        samples = share(batching.micro_batch_size, use.width)
        stages.append(
            StageTimes(
                c.forward.at(layers),
                c.backward.at(layers),
                float(c.exposed(layers)),  # numpy's number otherwise
                c.update.at(layers),
                layers * problem.costs.weight_gradients(use.site.rates, samples, tensor=use.site.tensor),
            )
        )
    bridged = tuple(a.pool.island != b.pool.island for a, b in pairwise(uses))
    return PipelineTimes(
        tuple(stages),
        pipeline.hops,
        bridged,
        batching.micro_batches,
        pipeline.forwards_ahead,
        pipeline.layers,
        pipeline.schedule,
        pipeline.chunks,
    )


def _waiting(candidate: Candidate, made: Simulated) -> float:
    """Share of the used devices' time in which they do not compute."""
    busy, total = 0.0, 0.0
    seconds: dict[tuple[int, int], float] = {}
    for span in made.spans:
        if span.kind in ("F", "B", "W", "update"):
            key = (span.replica, span.stage)
            seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
    for number, pipeline in enumerate(candidate.pipelines):
        for index, use in enumerate(pipeline.stage_uses):
            ranks = use.width * use.tensor
            busy += ranks * seconds.get((number, index), 0.0)
            total += ranks * made.step_time_s / pipeline.chunks
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
        schedule="auto",
        forwards_ahead=None,
        layers=None,
        split="auto",
    )
    found = Search(own, keep=1).run().candidates
    return samples / predict(own, found[0]).seconds if found else None


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


def rescheduled(problem: Problem, candidate: Candidate, schedule: Schedule) -> Prediction | None:
    """The candidate under a schedule, predicted; None where it cannot be: memory, or numbers that do not divide."""
    best: Prediction | None = None
    for chunks in schedule.chunks:
        found = [_variant(problem, p, schedule, chunks) for p in candidate.pipelines]
        pipelines = tuple(p for p in found if p is not None)
        if len(pipelines) == len(found) and (chunks == 1 or any(p.chunks > 1 for p in pipelines)):
            made = predict(problem, replace(candidate, pipelines=pipelines))
            if best is None or made.seconds < best.seconds:
                best = made
    return best


def faster_schedules(problem: Problem, chosen: Prediction) -> Iterator[tuple[str, float]]:
    """(schedule, relative gain) of what would make a chosen plan noticeably faster, by prediction."""
    if problem.schedule == "auto" and any(len(p.layers) > 1 for p in chosen.candidate.pipelines):
        for schedule in (s for s in SCHEDULES.values() if not s.timed_by_search):
            other = rescheduled(problem, chosen.candidate, schedule)
            if other is not None and chosen.seconds / other.seconds - 1 > WORTH_SAYING:
                yield schedule.name, chosen.seconds / other.seconds - 1


def _variant(problem: Problem, pipeline: Pipeline, schedule: Schedule, chunks: int) -> Pipeline | None:
    """Each device's layers in so many stages, which micro-batches go round as often; None where that cannot be."""
    if len(pipeline.layers) == 1:
        return replace(pipeline, schedule=schedule.name)  # one stage: every schedule is the same
    uses, batching, links = pipeline.stage_uses, pipeline.batching, problem.links
    devices = len(uses)
    if schedule.why_not(devices, batching.micro_batches) or min(pipeline.layers) < chunks:
        return None
    if chunks > 1 and not links.can_talk(uses[-1].pool, uses[0].pool):
        return None
    spans = [[b - a for a, b in (cut(n, chunks, c) for c in range(chunks))] for n in pipeline.layers]
    layers = tuple(spans[d][c] for c in range(chunks) for d in range(devices))
    held, memory = [], []
    for d, use in enumerate(uses):
        alive, need, on_host = _device_memory(problem, pipeline, schedule, d, layers)
        if need > usable_bytes(use.pool.rates) or on_host > use.pool.rates.host_memory_bytes:
            return None
        held.append(alive)
        memory.append(int(need))
    payload = problem.costs.boundary_bytes(batching.micro_batch_size)
    return replace(
        pipeline,
        schedule=schedule.name,
        chunks=chunks,
        layers=layers,
        choices=pipeline.choices * chunks,
        memory_bytes=tuple(memory) * chunks,
        forwards_ahead=pipeline.forwards_ahead if chunks == 1 else tuple(h[c] for c in range(chunks) for h in held),
        hops=tuple(links.hop_seconds(a, b, payload) for a, b in pairwise(uses * chunks)),
    )


def _device_memory(
    problem: Problem, pipeline: Pipeline, schedule: Schedule, device: int, layers: Sequence[int]
) -> tuple[tuple[int, ...], float, float]:
    """(micro-batches held of each of its stages, bytes per rank, those on its host) of a device under a schedule."""
    batching, use = pipeline.batching, pipeline.stage_uses[device]
    stages = tuple(range(device, len(layers), len(pipeline.layers)))
    ahead = pipeline.forwards_ahead[device]
    actions = schedule.actions(batching.micro_batches, stages=len(layers), held=stages, forwards_ahead=ahead)
    held = most_held(actions, last=schedule.frees)
    each = [_memory(problem, pipeline, s, layers[s], n, len(layers)) for s, n in zip(stages, held, strict=True)]
    need, on_host = (sum(part) for part in zip(*each, strict=True))
    if schedule.splits_backward:  # what weight gradients will be made of
        gradients = problem.costs.projection_gradient_bytes(
            share(batching.micro_batch_size, use.width), tensor=use.tensor
        )
        put_off = most_held(actions, first="B", last="W")
        need += sum(n * layers[s] * gradients for s, n in zip(stages, put_off, strict=True))
    return held, need, on_host


def _memory(
    problem: Problem, pipeline: Pipeline, stage: int, layers: int, held: int, stages: int
) -> tuple[float, float]:
    """Bytes per rank, on the device and on its host, of a stage (of all `stages`) with so many layers in flight."""
    devices = len(pipeline.layers)
    use, choice = pipeline.stage_uses[stage % devices], pipeline.choices[stage % devices]
    place = pipeline.batching.place(stage, stages, width=use.width, held=held)
    found = coefficients(problem.costs, use.site, place, choice)
    return found.memory.at(layers), found.host.at(layers)
