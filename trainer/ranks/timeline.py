"""What a rank did when: spans of compute and waiting, and where the time of a step went."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetctl.comm.operation.device import has_streams, mark, seconds_between, synchronize

KEPT_STEPS = 20
COMPUTE = ("R", "F", "B", "W")
WEIGHTS = "weights"  # the kind of a span that lies inside another one: part of a forward or backward


@dataclass(frozen=True)
class Span:
    """One action of a rank. Times in seconds of the host's monotonic clock.

    `kind`: F, B, W (compute), R (a forward of DPO's reference); wait-F, wait-B, wait-R (for micro-batch data of
    `peers`); sync (gradients with `peers`); weights (still on their way from `peers`: part of an R, F or B); world (the
    step's figures, everybody); update (optimiser).
    `bridged`: the data crosses islands.
    """

    kind: str
    start: float
    end: float
    micro_batch: int = -1
    peers: tuple[int, ...] = ()
    bridged: bool = False
    stage: int = -1  # of the computation, or of the one that is waited for


@dataclass(frozen=True)
class Shares:
    """Shares of all ranks' step time, in [0, 1]; they sum to 1 with `compute`."""

    compute: float
    bubble: float  # waiting for work that another rank had not finished
    bridge: float  # waiting for finished work to cross islands
    native: float  # waiting for finished work inside an island
    update: float


@dataclass(frozen=True)
class StepTimes:
    """Where one rank's step went, in seconds, as it can tell without the others: they sum to `step`."""

    step: float
    compute: float
    bridge_wait: float  # until data of another island had come, be they late or on their way: `Shares` tells apart
    update: float
    other_wait: float  # for ranks of its own island, and for all at the step's end


Marked = tuple[str, Any, Any, dict[str, Any]]


class Timeline:
    """Records the spans of the latest steps. On a device, from events on the compute stream: no host stalls.

    A step's clock is anchored where its figures are read anyway; its spans become times when the next one is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_device = device, has_streams(device)
        self._steps: deque[list[Span]] = deque(maxlen=KEPT_STEPS)
        self._open: list[Marked] = []
        self._anchor: tuple[float, Any] | None = None
        self._ended: tuple[list[Marked], tuple[float, Any] | None] | None = None

    @property
    def steps(self) -> deque[list[Span]]:
        """The spans of the latest steps; waits for the device to finish the last one."""
        if self._ended is not None:
            synchronize(self._device)
        self._resolve()
        return self._steps

    @property
    def known(self) -> list[Span] | None:
        """The spans of the latest step whose times are known by now; waits for nothing."""
        return self._steps[-1] if self._steps else None

    def begin_step(self) -> None:
        """Forget spans that belong to no step."""
        self._open = []

    @contextmanager
    def span(self, kind: str, **about: Any) -> Iterator[None]:
        """Record what happens inside as one span. They stand in the order in which they begin."""
        opened, start = self._open, self.mark()
        place = len(opened)
        opened.append((kind, start, start, about))
        try:
            yield
        finally:
            opened[place] = (kind, start, self.mark(), about)

    def anchor(self, reached: Any) -> None:
        """This mark was just reached, as the host knows by reading a result: it ties the device's clock to ours."""
        self._resolve()
        self._anchor = (time.monotonic(), reached)

    def end_step(self) -> None:
        """Close the step; the device may still be at its last spans."""
        self._ended = (self._open, self._anchor)
        self._open = []

    def mark(self) -> Any:
        """This moment on the compute stream."""
        return mark(self._device)

    def _resolve(self) -> None:
        if self._ended is None:
            return
        marked, anchor = self._ended
        self._ended = None
        clock = _Clock(marked[0][1], anchor) if self._on_device and marked else float
        self._steps.append([Span(k, clock(a), clock(b), **about) for k, a, b, about in marked])


class _Clock:
    """A step's events on the host's clock, by their distance from its first one."""

    def __init__(self, first: Any, anchor: tuple[float, Any] | None) -> None:
        assert anchor is not None, "a step on a device is anchored where its figures are read"
        self._first = first
        self._begin = anchor[0] - seconds_between(first, anchor[1])

    def __call__(self, reached: Any) -> float:
        return self._begin + seconds_between(self._first, reached)


def step_times(spans: Sequence[Span]) -> StepTimes:
    """Where this rank's step went, from its own spans alone; there is at least one."""
    compute = bridge_wait = update = 0.0
    for span in spans:
        seconds = span.end - span.start
        if span.kind in COMPUTE:
            compute += seconds
        elif span.kind == "update":
            update += seconds
        elif span.bridged and span.kind != "world":
            bridge_wait += seconds
        if span.kind == WEIGHTS:
            compute -= seconds
    step = max(s.end for s in spans) - min(s.start for s in spans)
    return StepTimes(step, compute, bridge_wait, update, max(0.0, step - compute - bridge_wait - update))


def shares(steps_of_ranks: Sequence[Sequence[Sequence[Span]]], among: Iterable[int] | None = None) -> Shares:
    """Where the time of ranks (all, or those `among`) went, from the spans [rank][step] of the same steps on all.

    A wait counts as bubble until the last peer had the data ready, after that as bridge or native transfer. All
    times are of one clock.
    """
    counted = sorted(range(len(steps_of_ranks)) if among is None else among)
    totals = dict.fromkeys(("compute", "bubble", "bridge", "native", "update", "all"), 0.0)
    for step in range(min(map(len, steps_of_ranks), default=0)):
        spans_of = [steps[step] for steps in steps_of_ranks]
        ready = _ready_times(spans_of)
        begin = min(s.start for spans in spans_of for s in spans)
        end = max(s.end for spans in spans_of for s in spans)
        for rank in counted:
            spans = spans_of[rank]
            for span in spans:
                _account(span, ready, totals)
            # what no span covers is idle time too: before the first action or after the last
            totals["bubble"] += (end - begin) - sum(s.end - s.start for s in spans if s.kind != WEIGHTS)
        totals["all"] += (end - begin) * len(counted)
    whole = totals["all"] or 1.0
    return Shares(*(max(0.0, totals[k]) / whole for k in ("compute", "bubble", "bridge", "native", "update")))


def on_one_clock(steps_of_ranks: Sequence[Sequence[Sequence[Span]]], hosts: Sequence[str]) -> list[list[list[Span]]]:
    """The spans [rank][step] with those of other hosts set to the clock of rank 0's: `hosts` are the ranks' own.

    A monotonic clock counts from its host's start. All know a step's figures at about the same moment: the median of
    those moments' distances is a clock's offset, good to what the last message of a small sum takes.
    """
    ranks_of: dict[str, list[Sequence[Sequence[Span]]]] = {}
    for steps, host in zip(steps_of_ranks, hosts, strict=True):
        ranks_of.setdefault(host, []).append(steps)
    met = {host: _met(ranks) for host, ranks in ranks_of.items()}
    offsets = dict.fromkeys(met, 0.0)
    for host, own in met.items():
        if distances := [there - here for here, there in zip(met[hosts[0]], own, strict=True)]:
            offsets[host] = statistics.median(distances)
    return [
        [[replace(s, start=s.start - offsets[host], end=s.end - offsets[host]) for s in spans] for spans in steps]
        for steps, host in zip(steps_of_ranks, hosts, strict=True)
    ]


def _met(steps_of_ranks: Sequence[Sequence[Sequence[Span]]]) -> list[float]:
    """When the last of these ranks knew each step's figures."""
    count = min(map(len, steps_of_ranks))
    return [max(s.end for steps in steps_of_ranks for s in steps[k] if s.kind == "world") for k in range(count)]


def replica_spread(
    steps_of_ranks: Sequence[Sequence[Sequence[Span]]], replica_of: Sequence[int | None]
) -> float | None:
    """How far apart replicas end their computing, as a share of the step: the median of steps [rank][step].

    Hosts' clocks differ: each rank's times count from the moment when all knew the step's figures. None where there
    is one replica, or no step.
    """
    found = []
    for step in range(min(map(len, steps_of_ranks), default=0)):
        ends: dict[int, float] = {}
        for spans, replica in zip((steps[step] for steps in steps_of_ranks), replica_of, strict=True):
            computed = [s.end for s in spans if s.kind in COMPUTE]
            if replica is not None and computed:
                met = max((s.end for s in spans if s.kind == "world"), default=0.0)
                ends[replica] = max(ends.get(replica, -math.inf), max(computed) - met)
        lengths = [s[-1].end - s[0].start for steps in steps_of_ranks if (s := steps[step])]
        if len(ends) > 1:
            length = max(lengths)
            found.append((max(ends.values()) - min(ends.values())) / length)
    return statistics.median(found) if found else None


Ready = dict[tuple[int, str, int, int], float]


def _ready_times(spans_of: Sequence[Sequence[Span]]) -> Ready:
    """(rank, kind, stage, micro-batch) -> when that rank had it ready (collectives: when it arrived)."""
    ready: Ready = {}
    for rank, spans in enumerate(spans_of):
        for span in spans:
            at = span.start if span.kind in ("sync", "world") else span.end
            ready[rank, span.kind, span.stage, span.micro_batch] = at
    return ready


def _account(span: Span, ready: Ready, totals: dict[str, float]) -> None:
    seconds = span.end - span.start
    if span.kind in COMPUTE:
        totals["compute"] += seconds
    elif span.kind == "update":
        totals["update"] += seconds
    elif span.kind == WEIGHTS:
        totals["bridge" if span.bridged else "native"] += seconds
        totals["compute"] -= seconds
    else:
        awaited = span.kind.removeprefix("wait-")
        times = [ready[key] for p in span.peers if (key := (p, awaited, span.stage, span.micro_batch)) in ready]
        idle = min(seconds, max(0.0, max(times, default=span.start) - span.start))
        totals["bubble"] += idle
        totals["bridge" if span.bridged else "native"] += seconds - idle
