"""Found pipelines under schedules that the closed form does not know: split backwards, several stages per device.

They are timed by the simulator alone, for arrangements that the search has found under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hetctl.trainer.model.sample_shares import share as cut
from hetctl.trainer.planning.arrange import Pipeline
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.predict import Prediction, predict
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import Candidate
from hetctl.trainer.planning.stages import StagePlace, coefficients, share
from hetctl.trainer.schedule import SCHEDULES, Schedule, most_held

WORTH_SAYING = 0.02  # relative gain


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
        alive, need = _device_memory(problem, pipeline, schedule, d, layers)
        if need > usable_bytes(use.pool.rates):
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
) -> tuple[tuple[int, ...], float]:
    """(micro-batches held of each of its stages, bytes per rank) of a device under a schedule."""
    batching, use = pipeline.batching, pipeline.stage_uses[device]
    stages = tuple(range(device, len(layers), len(pipeline.layers)))
    ahead = pipeline.forwards_ahead[device]
    actions = schedule.actions(batching.micro_batches, stages=len(layers), held=stages, forwards_ahead=ahead)
    held = most_held(actions, last=schedule.frees)
    need = sum(_memory(problem, pipeline, s, layers[s], n, len(layers)) for s, n in zip(stages, held, strict=True))
    if schedule.splits_backward:  # what weight gradients will be made of
        each = problem.costs.projection_gradient_bytes(share(batching.micro_batch_size, use.width), tensor=use.tensor)
        put_off = most_held(actions, first="B", last="W")
        need += sum(n * layers[s] * each for s, n in zip(stages, put_off, strict=True))
    return held, need


def _memory(problem: Problem, pipeline: Pipeline, stage: int, layers: int, held: int, stages: int) -> float:
    """Bytes per rank of a stage (of all `stages`) that holds so many layers and micro-batches."""
    devices = len(pipeline.layers)
    use, choice = pipeline.stage_uses[stage % devices], pipeline.choices[stage % devices]
    place = StagePlace(
        first=stage == 0,
        last=stage == stages - 1,
        samples=share(pipeline.batching.micro_batch_size, use.width),
        held=held,
        sync=pipeline.batching.sync,
        replicas=pipeline.batching.replicas,
    )
    return coefficients(problem.costs, use.site, place, choice).memory.at(layers)
