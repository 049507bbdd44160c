"""Found pipelines under schedules that the closed form does not know: split backwards, several stages per device.

They are timed by the simulator alone, for arrangements that the search has found under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hetctl.trainer.model.sample_shares import share as cut
from hetctl.trainer.pipeline.schedule import SCHEDULES, Schedule, most_held
from hetctl.trainer.planning.arrange import Pipeline
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.predict import Prediction, predict
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import Candidate
from hetctl.trainer.planning.stages import StagePlace, coefficients, share

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
    uses, batching, lanes = pipeline.stage_uses, pipeline.batching, problem.lanes
    devices = len(uses)
    if schedule.why_not(devices, batching.micro_batches) or min(pipeline.layers) < chunks:
        return None
    if chunks > 1 and not lanes.can_talk(uses[-1].pool, uses[0].pool):
        return None
    spans = [[b - a for a, b in (cut(n, chunks, c) for c in range(chunks))] for n in pipeline.layers]
    layers = tuple(spans[d][c] for c in range(chunks) for d in range(devices))
    held, memory = [], []
    for d, use in enumerate(uses):
        stages = tuple(range(d, len(layers), devices))
        actions = schedule.actions(
            batching.micro_batches, stages=len(layers), held=stages, forwards_ahead=pipeline.forwards_ahead[d]
        )
        held.append(most_held(actions, last=schedule.frees))
        need = sum(_memory(problem, pipeline, s, layers[s], held[d][c], len(layers)) for c, s in enumerate(stages))
        if schedule.splits_backward:  # what weight gradients will be made of
            each = problem.costs.projection_gradient_bytes(
                share(batching.micro_batch_size, use.width), tensor=use.tensor
            )
            put_off = most_held(actions, first="B", last="W")
            need += sum(put_off[c] * layers[s] * each for c, s in enumerate(stages))
        if need > usable_bytes(use.pool.rates):
            return None
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
        hops=tuple(lanes.hop_seconds(a, b, payload) for a, b in pairwise(uses * chunks)),
    )


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
