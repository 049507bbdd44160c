"""An event-driven simulator of a step: every forward, backward, transfer, gradient sum and update with its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from hetctl.trainer.schedule import SCHEDULES, Action

SpanKind = Literal["F", "B", "W", "send", "sync", "update"]


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

    def actions(self, device: int) -> tuple[Action, ...]:
        """What a device does."""
        held = self.devices[device]
        ahead = min(self.forwards_ahead[held[0]], self.micro_batches)
        actions = SCHEDULES[self.schedule].actions
        return actions(self.micro_batches, stages=len(self.stages), held=held, forwards_ahead=ahead)

    def without_bridges(self) -> PipelineTimes:
        """The same with transfers between islands in no time."""
        return replace(self, hops=tuple(0.0 if b else h for h, b in zip(self.hops, self.bridged, strict=True)))


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


class _Device:
    """A device's place in its action list, and when it is free."""

    def __init__(self, stages: Sequence[int], actions: Sequence[Action]) -> None:
        self.stages, self.actions = stages, actions
        self.next = 0
        self.free = 0.0


def _pipeline(number: int, times: PipelineTimes) -> tuple[list[SimulatedSpan], list[float]]:
    """(spans, end of each stage's last backward) of one replica, transfers first come, first served."""
    count, split = len(times.stages), SCHEDULES[times.schedule].splits_backward
    devices = [_Device(held, times.actions(d)) for d, held in enumerate(times.devices)]
    arrived: dict[tuple[str, int, int], float] = {}  # (kind, stage, micro-batch) -> when its input is there
    links = {(kind, i): 0.0 for kind in "FB" for i in range(count - 1)}
    ends = [0.0] * count
    spans: list[SimulatedSpan] = []
    progress = True
    while progress:
        progress = False
        for device in devices:
            while device.next < len(device.actions):
                action = device.actions[device.next]
                index = device.stages[action.chunk]
                ready = _ready(action, index, count, arrived)
                if ready is None:
                    break
                received, sent = _transfers(action, index, times.hops) if times.blocking else (0.0, 0.0)
                start = max(ready, device.free + received)
                ends[index] = end = start + times.stages[index].seconds(action, split=split)
                spans.append(SimulatedSpan(action.kind, number, index, start, end, action.micro_batch))
                spans += _send(number, action, index, count, times.hops, links, arrived, end)
                device.free = end + sent
                device.next += 1
                progress = True
    assert all(d.next == len(d.actions) for d in devices), "the schedule waits for itself"
    return spans, ends


def _ready(action: Action, index: int, count: int, arrived: dict[tuple[str, int, int], float]) -> float | None:
    """When an action's input is there; None: not known yet."""
    starts = action.kind == "W" or (action.kind == "F" and index == 0) or (action.kind == "B" and index == count - 1)
    return 0.0 if starts else arrived.get((action.kind, index, action.micro_batch))


def _transfers(action: Action, index: int, hops: Sequence[float]) -> tuple[float, float]:
    """Seconds in which a device receives an action's input, and in which it sends its result on."""
    before = hops[index - 1] if index else 0.0
    after = hops[index] if index < len(hops) else 0.0
    return {"F": (before, after), "B": (after, before), "W": (0.0, 0.0)}[action.kind]


def _send(
    number: int,
    action: Action,
    index: int,
    count: int,
    hops: Sequence[float],
    links: dict[tuple[str, int], float],
    arrived: dict[tuple[str, int, int], float],
    now: float,
) -> list[SimulatedSpan]:
    """Pass an action's result on, over a link that carries one micro-batch at a time in each direction."""
    peer = index + 1 if action.kind == "F" else index - 1
    if not 0 <= peer < count or action.kind == "W":
        return []
    boundary = min(index, peer)
    start = max(now, links[action.kind, boundary])
    end = start + hops[boundary]
    links[action.kind, boundary] = end
    arrived[action.kind, peer, action.micro_batch] = end
    return [SimulatedSpan("send", number, index, start, end, action.micro_batch, peer)] if end > start else []
