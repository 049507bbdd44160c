"""A found arrangement under another schedule: what it then takes, and whether it still fits.

Schedules that the closed form does not know (split backwards, several stages per device) are timed by the simulator
alone, for arrangements that the search has found under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from hetctl.trainer.model.sample_shares import share as cut
from hetctl.trainer.planning.arrange import Pipeline, bridged, deeper, tied_sum
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.pipelines import DEEP, Pipelines, deepest
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import Candidate
from hetctl.trainer.planning.stages import Coefficients, coefficients, share
from hetctl.trainer.schedule import SCHEDULES, Schedule, most_held


def under_schedules(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """These candidates, found under schedules that the search times, under every one that may be chosen."""
    made = [c for c in candidates if any(s.timed_by_search for s in problem.schedules)]
    piped = [c for c in candidates if not made or any(len(p.layers) > 1 for p in c.pipelines)]  # others are the same
    for schedule in (s for s in problem.schedules if not s.timed_by_search):
        made += [other for c in piped for other in rescheduled(problem, c, schedule)]
    return made


def rescheduled(problem: Problem, candidate: Candidate, schedule: Schedule) -> Iterator[Candidate]:
    """The candidate under a schedule, in every number of stages per device that can be: memory, and divisibility."""
    for chunks in schedule.chunks:
        found = [_variant(problem, p, schedule, chunks) for p in candidate.pipelines]
        pipelines = tuple(p for p in found if p is not None)
        if len(pipelines) == len(found) and (chunks == 1 or any(p.chunks > 1 for p in pipelines)):
            yield replace(candidate, pipelines=pipelines)


def deepened(problem: Problem, candidate: Candidate, pipelines: Pipelines) -> Candidate:
    """The candidate under a schedule that the search does not time with as many forwards in flight as make its step
    shortest: from those that were found for it, and from few, which leave it other ways to fit."""
    schedule = SCHEDULES[max(candidate.pipelines, key=lambda p: len(p.layers)).schedule]
    if problem.forwards_ahead is not None or schedule.timed_by_search or schedule.chunks != (1,):
        return candidate

    def tried(at: Candidate) -> Iterator[Candidate | None]:
        return (_at_depths(problem, at, pipelines, schedule, d) for d in deeper([p.times for p in at.pipelines]))

    few = [DEEP.in_flight(len(p.layers), p.batching.micro_batches) for p in candidate.pipelines]
    starts = (candidate, _at_depths(problem, candidate, pipelines, schedule, few))
    step_s = attrgetter("step_s")
    return min((deepest(c, tried, step_s) for c in starts if c is not None), key=step_s)


def _at_depths(
    problem: Problem, candidate: Candidate, pipelines: Pipelines, schedule: Schedule, depths: Sequence[tuple[int, ...]]
) -> Candidate | None:
    found = [
        pipelines.at_depth(p, ahead) if len(p.layers) > 1 else p
        for p, ahead in zip(candidate.pipelines, depths, strict=True)
    ]
    made = tuple(p for p in found if p is not None)
    if len(made) < len(found):
        return None
    return next(rescheduled(problem, replace(candidate, pipelines=made), schedule), None)


def _costs(problem: Problem, pipeline: Pipeline, stage: int, held: int, stages: int) -> Coefficients[float]:
    """Of a stage, of all `stages`, that holds so many micro-batches."""
    devices = len(pipeline.layers) // pipeline.chunks
    use, choice = pipeline.stage_uses[stage % devices], pipeline.choices[stage % devices]
    place = pipeline.batching.place(stage, stages, width=use.width, held=held)
    return coefficients(problem.costs, use.site, place, choice)


def _variant(problem: Problem, pipeline: Pipeline, schedule: Schedule, chunks: int) -> Pipeline | None:
    """Each device's layers in so many stages, which micro-batches go round as often; None where that cannot be."""
    if len(pipeline.layers) == 1 and not schedule.splits_backward:  # every schedule is the same
        return replace(pipeline, times=replace(pipeline.times, schedule=schedule.name))
    uses, count = pipeline.stage_uses, pipeline.batching.micro_batches
    if schedule.why_not(len(uses), count) or min(pipeline.layers) < chunks:
        return None
    if chunks > 1 and not problem.links.can_talk(uses[-1].pool, uses[0].pool):
        return None
    layers = dealt_out(pipeline.layers, chunks)
    held, memory = [], []
    for device, use in enumerate(uses):
        alive, need, on_host = _device_memory(problem, pipeline, schedule, device, layers)
        if need > usable_bytes(use.pool.rates) or on_host > use.pool.rates.host_memory_bytes:
            return None
        held.append(alive)
        memory.append(int(need))
    made = replace(pipeline, choices=pipeline.choices * chunks, memory_bytes=tuple(memory) * chunks)
    if chunks == 1:
        return replace(made, times=replace(pipeline.times, schedule=schedule.name))
    ahead = tuple(h[c] for c in range(chunks) for h in held)
    times = replace(pipeline.times, schedule=schedule.name, chunks=chunks, layers=layers, forwards_ahead=ahead)
    return with_times(problem, replace(made, times=times))


def dealt_out(layers: Sequence[int], chunks: int) -> tuple[int, ...]:
    """Each device's layers in so many stages: their counts in the order of the pipeline, which goes round so often."""
    ends = [[cut(count, chunks, c) for count in layers] for c in range(chunks)]
    return tuple(past - first for turn in ends for first, past in turn)


def with_times(problem: Problem, pipeline: Pipeline) -> Pipeline:
    """The pipeline with what its stages cost and take, by their layers and places, and the hops between them."""
    ahead, batching, uses = pipeline.forwards_ahead, pipeline.batching, pipeline.stage_uses
    held = [min(n, batching.micro_batches) for n in ahead]
    costs = tuple(_costs(problem, pipeline, stage, n, len(ahead)) for stage, n in enumerate(held))
    stages = tuple(c.times(layers) for c, layers in zip(costs, pipeline.layers, strict=True))
    hops = problem.links.hops(uses, problem.costs.hop_bytes(batching.micro_batch_size))
    return replace(
        pipeline,
        costs=costs,
        times=replace(
            pipeline.times,
            stages=stages,
            hops=hops,
            bridged=bridged(uses),
            tied=tied_sum(problem, uses),
        ),
    )


def _device_memory(
    problem: Problem, pipeline: Pipeline, schedule: Schedule, device: int, layers: Sequence[int]
) -> tuple[tuple[int, ...], float, float]:
    """(micro-batches held of each of its stages, bytes per rank, those on its host) of a device under a schedule."""
    batching, use = pipeline.batching, pipeline.stage_uses[device]
    stages = tuple(range(device, len(layers), len(pipeline.layers)))
    ahead = pipeline.forwards_ahead[device]
    actions = schedule.actions(batching.micro_batches, stages=len(layers), held=stages, forwards_ahead=ahead)
    chunks, samples = range(len(stages)), share(batching.micro_batch_size, use.width)
    held = tuple(int(most_held(actions, [float(c == own) for c in chunks])) for own in chunks)
    costs = [_costs(problem, pipeline, s, n, len(layers)) for s, n in zip(stages, held, strict=True)]
    mode = pipeline.choices[device].mode
    kept = problem.costs.activation_bytes(samples, tensor=use.tensor, mode=mode)
    working = problem.costs.under((mode,), use.pool.rates, [(samples, use.tensor)]).working.item()
    put_off = problem.costs.put_off_bytes(samples, tensor=use.tensor) if schedule.splits_backward else 0.0
    depths = [layers[s] for s in stages]
    need = sum(c.memory.at(n) - h * n * kept for c, n, h in zip(costs, depths, held, strict=True))
    need += most_held(actions, [n * kept for n in depths], [n * put_off for n in depths])
    if not mode.activations:  # those may be on their way for each of them
        need -= (len(stages) - 1) * working  # one computes at a time
    return held, need, sum(c.host.at(n) for c, n in zip(costs, depths, strict=True))
