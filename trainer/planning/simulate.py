"""A step simulated: every forward, backward, transfer, gradient sum and update with its times.

Devices keep to their action lists and links carry one micro-batch after the other, so the order in which things depend
on each other is the same whatever they take: it is worked out once, and times follow it (a max-plus recurrence).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from hetctl.trainer.schedule import SCHEDULES, Kind

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
    bridged_s: float = 0.0  # of sync_s: what crosses islands

    def seconds(self, kind: Kind, *, split: bool) -> float:
        """What an action takes."""
        if kind == "F":
            return self.forward_s
        if kind == "W":
            return self.weights_s
        return self.backward_s - (self.weights_s if split else 0.0)


class TiedSum(NamedTuple):
    """Seconds once a step in which the first and the last stage sum the gradient of an embedding that both hold."""

    seconds: float = 0.0
    bridged: bool = False  # the two are on two islands


NOT_TIED = TiedSum()


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
    tied: TiedSum = NOT_TIED

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
        """The same with transfers and sums between islands in no time."""
        return replace(
            self,
            stages=tuple(replace(s, sync_s=s.sync_s - s.bridged_s, bridged_s=0.0) for s in self.stages),
            hops=tuple(0.0 if b else h for h, b in zip(self.hops, self.bridged, strict=True)),
            tied=NOT_TIED if self.tied.bridged else self.tied,
        )


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


# device, which of `_seconds`, micro-batch, the slots that its input and its result arrive in (0: none), and the link
OrderedAction = tuple[int, int, int, int, int, int]


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
    sums = _sums(replicas, ends)
    synced = max(end for each in sums for _, end in each)
    step = synced
    for number, (times, each) in enumerate(zip(replicas, sums, strict=True)):
        spans += [SimulatedSpan("sync", number, i, a, b) for i, (a, b) in enumerate(each) if b > a]
        for held in times.devices:
            end = synced
            for index in held:
                begin, end = end, end + times.stages[index].update_s
                if end > begin:
                    spans.append(SimulatedSpan("update", number, index, begin, end))
            step = max(step, end)
    return Simulated(step, tuple(spans))


def busy_seconds(spans: Iterable[SimulatedSpan]) -> dict[tuple[int, int], float]:
    """(replica, stage) -> the seconds in which its devices compute."""
    found: dict[tuple[int, int], float] = {}
    for span in spans:
        if span.kind in (*KINDS, "update"):
            key = (span.replica, span.stage)
            found[key] = found.get(key, 0.0) + span.end_s - span.start_s
    return found


def step_seconds(replicas: Sequence[PipelineTimes], *, whole: bool = False) -> float:
    """What `simulate` comes to, without its spans; of many micro-batches the steady middle is taken as even, unless the
    `whole` step is asked for."""
    sums = _sums(replicas, [_finished(times, whole=whole) for times in replicas])
    synced = max(end for each in sums for _, end in each)
    return synced + max(sum(times.stages[i].update_s for i in held) for times in replicas for held in times.devices)


def least_seconds(times: PipelineTimes) -> float:
    """No step takes less: a stage waits for its first input, computes, and the stages before it run backwards last.

    For schedules that do not split backwards, devices of one stage each.
    """
    there = back = least = 0.0
    for stage, hop in zip(times.stages, (*times.hops, 0.0), strict=True):
        computed = there + times.micro_batches * (stage.forward_s + stage.backward_s)
        least = max(least, computed + max(stage.sync_s, back + times.stages[0].sync_s + times.tied.seconds))
        there, back = there + stage.forward_s + hop, back + stage.backward_s + hop
    return least + max(stage.update_s for stage in times.stages)


def _finished(times: PipelineTimes, *, whole: bool) -> list[float]:
    """When each stage's last backward ends."""
    if times.blocking:
        return _pipeline(0, times)[1]
    rhythm, devices = times.rhythm, len(times.stages) // times.chunks
    step = max(STEADY // 4, len(times.stages)) // devices * devices
    longer = 4 * step + rhythm.micro_batches % devices
    if whole or 2 * longer - step >= rhythm.micro_batches:  # as little work
        return _ends(times, rhythm)
    before, there = (_ends(times, rhythm.of_fewer(n)) for n in (longer - step, longer))
    further = (rhythm.micro_batches - longer) / step
    return [b + (b - a) * further for a, b in zip(before, there, strict=True)]


def _ends(times: PipelineTimes, rhythm: Rhythm) -> list[float]:
    """The recurrence alone: hot, since the search times thousands of pipelines by it."""
    seconds, count = _seconds(times), len(times.stages)
    free, done = [0.0] * (count // times.chunks), [0.0] * len(seconds)
    hops, links = times.hops * 2, [0.0] * (2 * len(times.hops))
    arrived = [0.0] * (1 + 2 * count * rhythm.micro_batches)
    for device, computed, _, source, target, link in action_order(rhythm):
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
    return [max(done[stage::count]) for stage in range(count)]


def _pipeline(number: int, times: PipelineTimes) -> tuple[list[SimulatedSpan], list[float]]:
    """(spans, end of each stage's last backward) of one replica, transfers first come, first served."""
    seconds, count = _seconds(times), len(times.stages)
    free, ends = [0.0] * (count // times.chunks), [0.0] * count
    hops, links = times.hops * 2, [0.0] * (2 * len(times.hops))
    arrived = [0.0] * (1 + 2 * count * times.micro_batches)
    spans: list[SimulatedSpan] = []
    received, passed = _transfers(times)
    for device, computed, micro_batch, source, target, link in action_order(times.rhythm):
        stage, kind = computed % count, KINDS[computed // count]
        start = max(free[device] + received[kind][stage], arrived[source])
        ends[stage] = end = start + seconds[computed]
        free[device] = end + passed[kind][stage]
        spans.append(SimulatedSpan(kind, number, stage, start, end, micro_batch))
        if target:
            sent = max(end, links[link])
            there = links[link] = arrived[target] = sent + hops[link]
            if there > sent:
                peer = stage + 1 if kind == "F" else stage - 1
                spans.append(SimulatedSpan("send", number, stage, sent, there, micro_batch, peer))
    return spans, ends


def _seconds(times: PipelineTimes) -> list[float]:
    """What each kind of action takes on each stage."""
    split = SCHEDULES[times.schedule].splits_backward
    return [stage.seconds(kind, split=split) for kind in KINDS for stage in times.stages]


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
    places = {(kind, stage): _place(rhythm, kind, stage) for kind in KINDS for stage in range(rhythm.stages)}
    ready = bytearray([1]) + bytearray(2 * rhythm.stages * rhythm.micro_batches)
    order: list[OrderedAction] = []
    at = [0] * count
    progress = True
    while progress:
        progress = False
        for device, actions in enumerate(lists):
            while at[device] < len(actions):
                action = actions[at[device]]
                computed, source, target, link = places[action.kind, held[device][action.chunk]]
                micro_batch = action.micro_batch
                if not ready[source and source + micro_batch]:
                    break
                target = target and target + micro_batch
                ready[target] = 1
                order.append((device, computed, micro_batch, source and source + micro_batch, target, link))
                at[device] += 1
                progress = True
    assert all(i == len(actions) for i, actions in zip(at, lists, strict=True)), "the schedule waits for itself"
    return tuple(order)


def _sums(replicas: Sequence[PipelineTimes], ends: Sequence[Sequence[float]]) -> list[list[tuple[float, float]]]:
    """When each stage's gradient sums start and end; those of a device's stages one after another."""
    found = []
    for times, ready in zip(replicas, _sums_start(replicas, ends), strict=True):
        spans, free = [(0.0, 0.0)] * len(ready), [0.0] * (len(ready) // times.chunks)
        for index in sorted(range(len(ready)), key=ready.__getitem__):
            device = index % len(free)
            start = max(ready[index], free[device])
            spans[index] = start, start + times.stages[index].sync_s
            free[device] = spans[index][1]
        if times.tied.seconds:  # no backward is left that could hide it
            spans[0] = spans[0][0], max(spans[0][1], spans[-1][1]) + times.tied.seconds
        found.append(spans)
    return found


def _place(rhythm: Rhythm, kind: Kind, stage: int) -> tuple[int, int, int, int]:
    """Of an action: which of `_seconds` it takes, the slots of the first micro-batch's input here and result there (0:
    none), and the link in between."""
    stages, step = rhythm.stages, 1 if kind == "F" else -1
    computed = KINDS.index(kind) * stages + stage
    waits, sends = (kind != "W" and 0 <= peer < stages for peer in (stage - step, stage + step))
    slot = 1 + computed * rhythm.micro_batches
    link = stage if kind == "F" else stages - 2 + stage
    return computed, slot if waits else 0, slot + step * rhythm.micro_batches if sends else 0, link if sends else 0


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
