"""Found pipelines under schedules that the closed form does not know: split backwards, several stages per device.

They are timed by the simulator alone, for arrangements that the search has found under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hetctl.trainer.model.sample_shares import share as cut
from hetctl.trainer.pipeline.schedule import INTERLEAVED, SPLIT, interleaved_actions, most_held
from hetctl.trainer.planning.arrange import Pipeline
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.predict import Prediction, predict
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import Candidate
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import StagePlace, coefficients, share

CHUNKS = (2, 3, 4)  # stages per device that are tried
WORTH_SAYING = 0.02  # relative gain


def rescheduled(problem: Problem, candidate: Candidate, schedule: str) -> Prediction | None:
    """The candidate under a schedule, predicted; None where it cannot be: memory, or numbers that do not divide."""
    best: Prediction | None = None
    for chunks in CHUNKS if schedule == INTERLEAVED else (1,):
        found = [_variant(problem, p, schedule, chunks) for p in candidate.pipelines]
        pipelines = tuple(p for p in found if p is not None)
        if len(pipelines) == len(found) and (schedule == SPLIT or any(p.chunks > 1 for p in pipelines)):
            made = predict(problem, replace(candidate, pipelines=pipelines))
            if best is None or made.seconds < best.seconds:
                best = made
    return best


def faster_schedules(problem: Problem, chosen: Prediction) -> Iterator[tuple[str, float]]:
    """(schedule, relative gain) of what would make a chosen plan noticeably faster, by prediction."""
    if problem.schedule == "auto" and any(len(p.layers) > 1 for p in chosen.candidate.pipelines):
        for schedule in (SPLIT, INTERLEAVED):
            other = rescheduled(problem, chosen.candidate, schedule)
            if other is not None and chosen.seconds / other.seconds - 1 > WORTH_SAYING:
                yield schedule, chosen.seconds / other.seconds - 1


def _variant(problem: Problem, pipeline: Pipeline, schedule: str, chunks: int) -> Pipeline | None:
    if len(pipeline.layers) == 1:
        return replace(pipeline, schedule=schedule)  # one stage: every schedule is the same
    return _split(problem, pipeline) if schedule == SPLIT else _interleaved(problem, pipeline, chunks)


def _split(problem: Problem, pipeline: Pipeline) -> Pipeline | None:
    """Stage i puts off the weight gradients of i micro-batches, and holds what they need."""
    memory = []
    count, size = pipeline.batching.micro_batches, pipeline.batching.micro_batch_size
    for index, use in enumerate(pipeline.stage_uses):
        held = min(count, pipeline.forwards_ahead[index] + index)
        gradients = problem.costs.projection_gradient_bytes(share(size, use.width), tensor=use.tensor)
        need = _memory(problem, pipeline, index, pipeline.layers[index], held, len(pipeline.layers))
        need += min(index + 1, count) * pipeline.layers[index] * gradients
        if need > usable_bytes(use.pool.rates):
            return None
        memory.append(int(need))
    return replace(pipeline, schedule=SPLIT, memory_bytes=tuple(memory))


def _interleaved(problem: Problem, pipeline: Pipeline, chunks: int) -> Pipeline | None:
    """Each device's layers in so many stages; micro-batches go round all devices as often."""
    uses, batching = pipeline.stage_uses, pipeline.batching
    devices, lanes = len(uses), problem.lanes
    if batching.micro_batches % devices or min(pipeline.layers) < chunks:
        return None
    if not lanes.can_talk(uses[-1].pool, uses[0].pool):
        return None
    spans = [[b - a for a, b in (cut(n, chunks, c) for c in range(chunks))] for n in pipeline.layers]
    layers = tuple(spans[d][c] for c in range(chunks) for d in range(devices))
    held = [
        most_held(interleaved_actions(batching.micro_batches, devices=devices, device=d, chunks=chunks), last="B")
        for d in range(devices)
    ]
    memory = []
    for d, use in enumerate(uses):
        stages = [c * devices + d for c in range(chunks)]
        need = sum(_memory(problem, pipeline, s, layers[s], held[d][c], len(layers)) for c, s in enumerate(stages))
        if need > usable_bytes(use.pool.rates):
            return None
        memory.append(int(need))
    payload = problem.costs.boundary_bytes(batching.micro_batch_size)
    round_trip: list[PoolUse] = list(uses) * chunks
    return replace(
        pipeline,
        schedule=INTERLEAVED,
        chunks=chunks,
        layers=layers,
        choices=pipeline.choices * chunks,
        memory_bytes=tuple(memory) * chunks,
        forwards_ahead=tuple(held[d][c] for c in range(chunks) for d in range(devices)),
        hops=tuple(lanes.hop_seconds(a, b, payload) for a, b in pairwise(round_trip)),
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
