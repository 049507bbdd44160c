"""A step simulated: every forward, backward, transfer, gradient sum and update with its times.

Devices keep to their action lists and links carry one micro-batch after the other, so the order in which things depend
on each other is the same whatever they take: it is worked out once, and times follow it (a max-plus recurrence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from hetctl.trainer.schedule import SCHEDULES, Action, Kind

SpanKind = Literal["F", "B", "W", "send", "sync", "update"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
STEADY = 96  # micro-batches after which the rest of a step is taken to go on as evenly


@dataclass(frozen=True)
class StageTimes:
    """What the stages of a pipeline take: seconds per micro-batch, and once a step."""

    forward_s: float
    backward_s: float  # weight gradients included
    sync_s: float = 0.0  # gradient sums that backward does not hide
    update_s: float = 0.0
    weights_s: float = 0.0  # of backward: what a schedule may put off

    def seconds(self, action: Action, *, split: bool) -> float:
        """What an action takes."""
        if action.kind == "F":
            return self.forward_s
        if action.kind == "W":
            return self.weights_s
        return self.backward_s - (self.weights_s if split else 0.0)


@dataclass(frozen=True)
class PipelineTimes:
    """One replica to simulate. `hops` are seconds per boundary and direction, `bridged` whether islands are crossed."""

    stages: tuple[StageTimes, ...]
    hops: tuple[float, ...]
    bridged: tuple[bool, ...]
    micro_batches: int
    forwards_ahead: tuple[int, ...]
    layers: tuple[int, ...]  # per stage: whose gradients are summed with whose
    schedule: str = "1f1b"
    chunks: int = 1  # stages per device: device d holds stages d, d + devices, ..
    blocking: bool = False  # devices transfer between their actions, not beside them: so some engines do

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device."""
        count = len(self.stages) // self.chunks
        return tuple(tuple(range(d, len(self.stages), count)) for d in range(count))

    @property
    def rhythm(self) -> Rhythm:
        """All that the order of its actions depends on."""
        return Rhythm(self.schedule, self.micro_batches, len(self.stages), self.chunks, self.forwards_ahead)

    def without_bridges(self) -> PipelineTimes:
        """The same with transfers between islands in no time."""
        return replace(self, hops=tuple(0.0 if b else h for h, b in zip(self.hops, self.bridged, strict=True)))


class Rhythm(NamedTuple):
    """What the order of a pipeline's actions depends on: no times."""

    schedule: str
    micro_batches: int
    stages: int
    chunks: int
    forwards_ahead: tuple[int, ...]

    def of_fewer(self, micro_batches: int) -> Rhythm:
        """The same for fewer micro-batches; where all were in flight all are again."""
        ahead = tuple(min(a, micro_batches) if a >= self.micro_batches else a for a in self.forwards_ahead)
        return self._replace(micro_batches=micro_batches, forwards_ahead=ahead)


# device, kind, stage, micro-batch, whether it waits for an input, and the boundary that its result crosses, if any
OrderedAction = tuple[int, Kind, int, int, bool, int | None]


@dataclass(frozen=True)
class SimulatedSpan:
    """Something that took a while. `stage` is where it ran; a send runs from `stage` to `peer`."""

    kind: SpanKind
    replica: int
    stage: int
    start_s: float
    end_s: float
    micro_batch: int | None = None
    peer: int | None = None


@dataclass(frozen=True)
class Simulated:
    """A whole step of all replicas."""

    step_time_s: float
    spans: tuple[SimulatedSpan, ...]


def simulate(replicas: Sequence[PipelineTimes]) -> Simulated:
    """The step of these replicas: pipelines side by side, then gradient sums, then the update everywhere.

    A stage's gradients are summed when all stages that share layers with it have finished their backward passes;
    the optimiser waits for the exact global norm, hence for everybody.
    """
    spans: list[SimulatedSpan] = []
    ends: list[list[float]] = []
    for number, times in enumerate(replicas):
        made, finished = _pipeline(number, times)
        spans += made
        ends.append(finished)
    synced = 0.0
    ready = _sums_start(replicas, ends)
    for number, times in enumerate(replicas):
        for index, stage in enumerate(times.stages):
            start = ready[number][index]
            if stage.sync_s > 0:
                spans.append(SimulatedSpan("sync", number, index, start, start + stage.sync_s))
            synced = max(synced, start + stage.sync_s)
    step = synced
    for number, times in enumerate(replicas):
        for index, stage in enumerate(times.stages):
            if stage.update_s > 0:
                spans.append(SimulatedSpan("update", number, index, synced, synced + stage.update_s))
            step = max(step, synced + stage.update_s)
    return Simulated(step, tuple(spans))


def step_seconds(replicas: Sequence[PipelineTimes]) -> float:
    """What `simulate` comes to, without its spans; of many micro-batches the steady middle is taken as even."""
    ready = chain.from_iterable(_sums_start(replicas, [_finished(times) for times in replicas]))
    stages = [stage for times in replicas for stage in times.stages]
    synced = max(start + stage.sync_s for start, stage in zip(ready, stages, strict=True))
    return synced + max(stage.update_s for stage in stages)


def least_seconds(times: PipelineTimes) -> float:
    """No step takes less: a stage waits for its first input, computes, and the stages before it run backwards last.

    For schedules that do not split backwards, devices of one stage each.
    """
    there = back = least = 0.0
    for stage, hop in zip(times.stages, (*times.hops, 0.0), strict=True):
        computed = there + times.micro_batches * (stage.forward_s + stage.backward_s)
        least = max(least, computed + max(stage.sync_s, back + times.stages[0].sync_s))
        there, back = there + stage.forward_s + hop, back + stage.backward_s + hop
    return least + max(stage.update_s for stage in times.stages)


def _finished(times: PipelineTimes) -> list[float]:
    """When each stage's last backward ends."""
    if times.blocking:
        return _pipeline(0, times)[1]
    rhythm, devices = times.rhythm, len(times.stages) // times.chunks
    step = max(STEADY // 4, len(times.stages)) // devices * devices
    longer = 4 * step + rhythm.micro_batches % devices
    if longer >= rhythm.micro_batches:
        return _ends(times, rhythm)
    before, there = (_ends(times, rhythm.of_fewer(n)) for n in (longer - step, longer))
    further = (rhythm.micro_batches - longer) / step
    return [b + (b - a) * further for a, b in zip(before, there, strict=True)]


def _ends(times: PipelineTimes, rhythm: Rhythm) -> list[float]:
    """The recurrence alone: hot, since the search times thousands of pipelines by it."""
    split, stages = SCHEDULES[times.schedule].splits_backward, times.stages
    seconds = [stage.seconds(Action(kind, 0), split=split) for kind in KINDS for stage in stages]
    free, done = [0.0] * (len(stages) // times.chunks), [0.0] * len(seconds)
    hops, links = times.hops * 2, [0.0] * (2 * len(times.hops))
    arrived = [0.0] * (1 + 2 * len(stages) * rhythm.micro_batches)
    for device, computed, source, target, link in _slots(rhythm):
        end, there = free[device], arrived[source]
        if there > end:
            end = there
        end += seconds[computed]
        free[device] = done[computed] = end
        if target:
            sent = links[link]
            if sent > end:
                end = sent
            links[link] = arrived[target] = end + hops[link]
    return [max(done[stage :: len(stages)]) for stage in range(len(stages))]


@lru_cache(maxsize=512)
def _slots(rhythm: Rhythm) -> tuple[tuple[int, int, int, int, int], ...]:
    """`action_order` for the recurrence: device, which of its durations, and where in a list results arrive: its own
    input (0: it waits for none) and what it sends (0: nothing) over which link."""
    stages, count = rhythm.stages, rhythm.micro_batches
    slots = []
    for device, kind, stage, micro_batch, waits, boundary in action_order(rhythm):
        row, back = KINDS.index(kind) * stages, kind == "B"
        here, peer = (1 + (row + s) * count + micro_batch for s in (stage, stage - 1 if back else stage + 1))
        link = back * (stages - 1) + (boundary or 0)
        slots.append((device, row + stage, here if waits else 0, 0 if boundary is None else peer, link))
    return tuple(slots)


def _pipeline(number: int, times: PipelineTimes) -> tuple[list[SimulatedSpan], list[float]]:
    """(spans, end of each stage's last backward) of one replica, transfers first come, first served."""
    split = SCHEDULES[times.schedule].splits_backward
    free, ends = [0.0] * (len(times.stages) // times.chunks), [0.0] * len(times.stages)
    arrived: dict[tuple[Kind, int, int], float] = {}
    links: dict[tuple[Kind, int], float] = {}
    spans: list[SimulatedSpan] = []
    received, passed = _transfers(times)
    for device, kind, stage, micro_batch, waits, boundary in action_order(times.rhythm):
        ready = free[device] + received[kind][stage]
        start = max(ready, arrived[kind, stage, micro_batch] if waits else 0.0)
        ends[stage] = end = start + times.stages[stage].seconds(Action(kind, micro_batch), split=split)
        free[device] = end + passed[kind][stage]
        spans.append(SimulatedSpan(kind, number, stage, start, end, micro_batch))
        if boundary is not None:
            peer, sent = (stage + 1 if kind == "F" else stage - 1), max(end, links.get((kind, boundary), 0.0))
            there = links[kind, boundary] = arrived[kind, peer, micro_batch] = sent + times.hops[boundary]
            if there > sent:
                spans.append(SimulatedSpan("send", number, stage, sent, there, micro_batch, peer))
    return spans, ends


def _transfers(times: PipelineTimes) -> tuple[dict[Kind, list[float]], dict[Kind, list[float]]]:
    """By stage the seconds in which its device receives an action's input, and sends its result: none of its own where
    transfers do not block it."""
    nothing = [0.0] * len(times.stages)
    if not times.blocking:
        return dict.fromkeys(KINDS, nothing), dict.fromkeys(KINDS, nothing)
    before, after = [0.0, *times.hops], [*times.hops, 0.0]
    return {"F": before, "B": after, "W": nothing}, {"F": after, "B": before, "W": nothing}


@lru_cache(maxsize=512)
def action_order(rhythm: Rhythm) -> tuple[OrderedAction, ...]:
    """The actions of all devices, each after those it waits for. AssertionError: one waits for itself."""
    count, schedule = rhythm.stages // rhythm.chunks, SCHEDULES[rhythm.schedule]
    held = [tuple(range(d, rhythm.stages, count)) for d in range(count)]
    ahead = [min(rhythm.forwards_ahead[stages[0]], rhythm.micro_batches) for stages in held]
    lists = [
        schedule.actions(rhythm.micro_batches, stages=rhythm.stages, held=h, forwards_ahead=a)
        for h, a in zip(held, ahead, strict=True)
    ]
    done: set[tuple[Kind, int, int]] = set()
    order: list[OrderedAction] = []
    at = [0] * count
    progress = True
    while progress:
        progress = False
        for device, actions in enumerate(lists):
            while at[device] < len(actions):
                action = actions[at[device]]
                kind, stage, micro_batch = action.kind, held[device][action.chunk], action.micro_batch
                source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
                waits = kind != "W" and 0 <= source < rhythm.stages
                if waits and (kind, source, micro_batch) not in done:
                    break
                done.add((kind, stage, micro_batch))
                boundary = min(stage, target) if kind != "W" and 0 <= target < rhythm.stages else None
                order.append((device, kind, stage, micro_batch, waits, boundary))
                at[device] += 1
                progress = True
    assert all(i == len(actions) for i, actions in zip(at, lists, strict=True)), "the schedule waits for itself"
    return tuple(order)


def _sums_start(replicas: Sequence[PipelineTimes], ends: Sequence[Sequence[float]]) -> list[list[float]]:
    """When each stage's gradient sums can start: once every stage that shares a layer with it is done."""
    edges = [[0, *accumulate(times.layers)] for times in replicas]
    found = []
    for number, times in enumerate(replicas):
        mine = []
        for index in range(len(times.stages)):
            low, high = edges[number][index], edges[number][index + 1]
            sharing = [
                ends[other][k]
                for other, theirs in enumerate(edges)
                for k in range(len(theirs) - 1)
                if theirs[k] < high and low < theirs[k + 1]
            ]
            mine.append(max(sharing))
        found.append(mine)
    return found
