"""Which stage takes how many layers: an exact dynamic program over stages under memory, and two simpler rules.

All blocks of a model are alike, so a stage is described by tables over its number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

WORTH_CAPPING = 0.01  # share of a step that its ends take, from which on ends are weighed against turns
CAPS, CAPS_APART = 12, 0.04  # at most, and as a share of a step
ROUGH = 0.005  # tolerance from which on ends are not weighed so
TRIPS = np.geomspace(1.0, 2.0, 6)  # how much longer than at least a round trip may be
ROUNDING = 1 + 1e-12


@dataclass(frozen=True, eq=False)
class StageTable:
    """One stage: entry [row, k] holds for k layers; infinity where that row's way does not fit into memory.

    `beat` is seconds of one micro-batch (forward and backward), `end` seconds once a step (gradient sums that
    backward does not hide, optimiser). A stage turns round once a beat, or, where that is longer, in what a micro-batch
    takes to the last stage and back (all beats from here on, and `trip_s` of transfers) over its forwards in flight.
    """

    beat: Floats  # [rows, layers + 1]
    end: Floats  # [rows, layers + 1]
    in_flight: float = np.inf  # where all micro-batches may be, nothing waits
    trip_s: float = 0.0

    @cached_property
    def fastest(self) -> _Fastest:
        """At its fastest, however it ends."""
        return _Fastest(self)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The least and the most of what fits."""
        finite = self.end[:, 1:][np.isfinite(self.end[:, 1:])]
        return (float(finite.min()), float(finite.max())) if len(finite) else (np.inf, -np.inf)


@dataclass(frozen=True)
class Split:
    """Layers and row (an index into the tables' first axis) per stage, and the time the rule below gives."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    seconds: float


def best_split(
    tables: Sequence[StageTable],
    layers: int,
    *,
    micro_batches: int,
    floor: float = 0.0,
    bound: float = np.inf,
    tolerance: float = 0.0,
) -> Split | None:
    """The best of `Splits`, for stages that are asked about once."""
    return Splits(tables, layers).best(micro_batches, floor=floor, bound=bound, tolerance=tolerance)


class Splits:
    """All splits of so many layers among stages. What was found serves any number of micro-batches."""

    def __init__(self, tables: Sequence[StageTable], layers: int) -> None:
        self.tables, self.layers = tables, layers

    @cached_property
    def _uncapped(self) -> _Capped:
        return _Capped(self.tables, self.layers, np.inf)

    def best(
        self, micro_batches: int, *, floor: float = 0.0, bound: float = np.inf, tolerance: float = 0.0
    ) -> Split | None:
        """The split with the least `sum(beat) + max(floor, (m - 1) max(turn)) + max(end)`: all wait for each other's
        ends.

        Under a threshold on turns a dynamic program from the last stage on minimises the sum of beats. That least sum
        never grows with the threshold, so spans of thresholds are halved until none can be better (by more than the
        relative `tolerance`). The same for ends capped ever less tightly, while that could gain. Exact where nothing
        waits for round trips and ends are alike. None when nothing fits, or nothing is faster than `bound`.
        """
        further, every, best = micro_batches - 1, self._uncapped, None
        if every.least + floor + self._ends[0] >= bound or not len(every.turns):
            return None
        least = every.least + max(floor, further * float(every.turns[0]))
        caps = self._caps(least, rough=tolerance >= ROUGH)
        if len(caps) > 2:  # every cap takes tables of its own, the least without any serves them all
            least = every.least_without_ends(further, floor, bound - self._ends[0])
        for ends, cap in pairwise(caps):
            if least + ends >= bound:
                break
            if cap < np.inf and not self._room(cap, (bound - every.least - ends) / further if further else np.inf):
                continue
            capped = every if cap == np.inf else _Capped(self.tables, self.layers, cap)
            found = capped.best(further, floor, bound, tolerance, ends)
            if found is not None:
                best, bound = found, found.seconds
        return best

    def _room(self, cap: float, threshold: float) -> bool:
        """Whether stages that end within a cap, each with beats within a threshold, hold all layers."""
        beats, ends, first = self._stacked
        held = (beats <= threshold) & (ends <= cap)
        most = np.maximum.reduceat((held * np.arange(1, self.layers + 1)).max(axis=1), first)
        return bool(most.min() >= 1 and most.sum() >= self.layers)

    @cached_property
    def _stacked(self) -> tuple[Floats, Floats, list[int]]:
        """Beats and ends of all stages' rows for 1, 2, .. layers, and where each stage's rows begin."""
        beats, ends = (
            np.concatenate([of(t) for t in self.tables])[:, 1:] for of in (attrgetter("beat"), attrgetter("end"))
        )
        return beats, ends, [0, *accumulate(len(t.beat) for t in self.tables[:-1])]

    @cached_property
    def _ends(self) -> tuple[float, float]:
        every = [t.ends for t in self.tables]
        return min(least for least, _ in every), max(most for _, most in every)

    @cached_property
    def _every_end(self) -> list[float]:
        ends = np.unique(self._stacked[1])
        return ends[np.isfinite(ends)].tolist()  # type: ignore[no-any-return]

    def _caps(self, seconds: float, *, rough: bool) -> list[float]:
        """Ends to weigh against turns: nobody's are below the first, and what a round allows anew is above its first.

        `seconds`: least of a step without its end. As near to each other as is worth it, or so many, since layers are
        moved one by one afterwards.
        """
        lowest, highest = self._ends
        if rough or highest - lowest < WORTH_CAPPING * seconds:
            return [lowest, np.inf]
        apart, group, caps = max(CAPS_APART * seconds, (highest - lowest) / CAPS), lowest, [lowest]
        for before, end in pairwise(self._every_end):
            if end > group + apart:  # a cap is the last of those that are near each other
                caps.append(before)
                group = end
        return [*caps, np.inf]


class _Found(NamedTuple):
    """The split with the least sum of beats under a threshold, and under all from `first` on up to that one."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    beats: float
    turn: float
    end: float
    first: int


class _Capped:
    """Splits whose stages all end within a cap: under each threshold on turns the one with the least sum of beats."""

    def __init__(self, tables: Sequence[StageTable], layers: int, cap: float) -> None:
        self.tables, self.layers = tables, layers
        ways = {id(t): t.fastest if cap == np.inf else _Fastest(t, cap) for t in tables}
        self.ways = [ways[id(t)] for t in tables]
        self.least = self._sum_bound()

    @cached_property
    def turns(self) -> Floats:
        """Thresholds worth trying, ascending."""
        turns = self._thresholds() if np.isfinite(self.least) else np.zeros(0)
        return turns[self._first_feasible(turns) :]

    @cached_property
    def _known(self) -> list[_Found | Literal[False] | None]:
        return [None] * len(self.turns)

    def least_without_ends(self, further: int, floor: float, bound: float) -> float:
        """The least `sum(beat) + max(floor, further max(turn))`; the bound where none is below it."""
        found = self.best(further, floor, bound, 0.0, 0.0, weigh_ends=False)
        return bound if found is None else found.seconds

    def best(
        self, further: int, floor: float, bound: float, tolerance: float, ends: float, *, weigh_ends: bool = True
    ) -> Split | None:
        """The best below the bound, where the last stage to end takes at least so long for that."""
        best, turns = None, self.turns
        worth = int(turns.searchsorted((bound - self.least - ends) / further)) if further else len(turns)
        # (first, last) thresholds still to be looked at, and a sum of beats that none of them goes below
        spans = [(0 if further else max(worth - 1, 0), worth - 1, self.least)]
        while spans:
            first, last, beats = spans.pop()
            if first > last or max(floor, further * float(turns[first])) + beats + ends >= bound * (1 - tolerance):
                continue
            middle = last if last == worth - 1 else (first + last) // 2  # the loosest first
            found = self._under(middle)
            spans.append((middle + 1, last, beats))
            if not found:
                continue  # nor is there a split under any smaller threshold
            spans.append((first, found.first - 1, max(found.beats, beats)))
            seconds = found.beats + max(floor, further * found.turn) + (found.end if weigh_ends else 0.0)
            if seconds < bound:
                best, bound = Split(found.layers, found.rows, seconds), seconds
                if tolerance >= ROUGH:  # others are taken to end alike
                    ends = found.end
        return best

    def _under(self, index: int) -> _Found | Literal[False]:
        """What is best under a threshold; False where there is no split."""
        known = self._known[index]
        if known is None:
            layers = self._least_sum(float(self.turns[index]))
            known = self._timed(layers, index) if layers else False
            start = known.first if known else 0
            self._known[start : index + 1] = [known] * (index + 1 - start)
        return known

    def _timed(self, layers: tuple[int, ...], index: int) -> _Found:
        rows = tuple(int(way.row[k - 1]) for way, k in zip(self.ways, layers, strict=True))
        held = list(zip(self.tables, rows, layers, strict=True))
        beats = [float(t.beat[r, k]) for t, r, k in held]
        trips = list(accumulate(reversed(beats)))[::-1]
        turn = max(max(b, (s + t.trip_s) / t.in_flight) for b, s, t in zip(beats, trips, self.tables, strict=True))
        first = min(int(self.turns.searchsorted(turn * (1 - 1e-12))), index)
        return _Found(layers, rows, sum(beats), turn, max(float(t.end[r, k]) for t, r, k in held), first)

    def _sum_bound(self) -> float:
        """No sum of beats is less: each stage at its best for a price per layer, and all layers at that price."""
        price = min(way.price for way in self.ways)
        if not np.isfinite(price):
            return np.inf
        charged = price * np.arange(1, self.layers + 1)
        spare = {way: float((way.beat - charged).min()) for way in set(self.ways)}
        return sum(spare[way] for way in self.ways) + price * self.layers

    def _thresholds(self) -> Floats:
        """All beats, and round trips of the least sum of beats or somewhat more."""
        waits = [(self.least + t.trip_s) / t.in_flight * TRIPS for t in self.tables if t.in_flight < np.inf]
        every = np.sort(np.concatenate([*(way.beat for way in set(self.ways)), *waits]))
        return every[: every.searchsorted(np.inf)]

    def _first_feasible(self, thresholds: Floats) -> int:
        """Index of the first threshold under which the stages' largest counts together reach all layers."""
        room, first = np.zeros(len(thresholds), dtype=np.int64), 0
        for way, count in Counter(self.ways).items():
            most = way.least.searchsorted(thresholds, side="right")
            room += count * most
            first = max(first, int(most.searchsorted(1)))  # each stage holds a layer
        return max(first, int(room.searchsorted(self.layers)))

    def _least_sum(self, threshold: float) -> tuple[int, ...] | None:
        """Layers of the least sum of beats with every stage's turns within the threshold."""
        layers = self.layers
        rest = np.full(2 * layers + 1, np.inf)  # from `layers` on: least sums of later stages, by how many they hold
        rest[layers] = 0.0
        # [held from here on, own - 1] -> that of the later stages
        later = np.ndarray((layers + 1, layers), np.float64, rest, 8 * (layers - 1), (8, -8))
        reached: list[Floats] = []
        for table, way in zip(reversed(self.tables), reversed(self.ways), strict=True):
            most = way.most(threshold)
            if not most:
                return None
            reach = later[:, :most] + way.within(most, threshold)
            best = reach.min(axis=1)
            if table.in_flight < np.inf:
                best[best > (table.in_flight * threshold - table.trip_s) * ROUNDING] = np.inf
            rest[layers:] = best
            reached.append(reach)
        if not np.isfinite(rest[-1]):
            return None
        counts, left = [], layers
        for reach in reversed(reached):
            counts.append(int(reach[left].argmin()) + 1)
            left -= counts[-1]
        return tuple(counts)


class _Fastest:
    """A stage at its fastest within a cap on ends, for 1, 2, .. layers."""

    def __init__(self, table: StageTable, cap: float = np.inf) -> None:
        beats = table.beat[:, 1:] if cap == np.inf else np.where(table.end <= cap, table.beat, np.inf)[:, 1:]
        self.beat, self.row = beats.min(axis=0), beats.argmin(axis=0)
        self.least = np.minimum.accumulate(self.beat[::-1])[::-1]  # of so many layers or more
        self.rising = bool((self.least == self.beat).all())
        self.price = float((self.beat / np.arange(1, len(self.beat) + 1)).min())  # a layer's, at best

    def most(self, threshold: float) -> int:
        """The most layers that take no longer."""
        return int(self.least.searchsorted(threshold, side="right"))

    def within(self, most: int, threshold: float) -> Floats:
        """The beats of up to so many layers; infinity for those beyond the threshold."""
        beat = self.beat[:most]
        return beat if self.rising else np.where(beat <= threshold, beat, np.inf)


def fixed_split(
    tables: Sequence[StageTable], layers: Sequence[int], *, micro_batches: int, floor: float = 0.0
) -> Split | None:
    """The best rows for layers given by hand. None when they do not fit."""
    only = []
    for table, count in zip(tables, layers, strict=True):
        keep = np.full(table.beat.shape, np.inf)
        keep[:, count] = 0.0
        only.append(StageTable(table.beat + keep, table.end, table.in_flight, table.trip_s))
    return best_split(only, sum(layers), micro_batches=micro_batches, floor=floor)


def uniform_layers(stages: int, layers: int) -> tuple[int, ...]:
    """Equal shares; the first stages take the remainder."""
    return tuple(layers // stages + (i < layers % stages) for i in range(stages))


def holmes_layers(speeds: Sequence[float], layers: int, *, alpha: float = 1.0) -> tuple[int, ...]:
    """Holmes' rule (arXiv 2312.03549): floor(alpha S_i / sum(S) N) layers, the remainder to the last stage."""
    total = sum(speeds)
    # the small addend keeps exact shares (such as 0.5 x 30) from falling through floor
    counts = [int(min(alpha * s / total * layers + 1e-9, layers)) for s in speeds[:-1]]
    return (*counts, layers - sum(counts))


def undominated(costs: Floats) -> NDArray[np.bool_]:
    """[.., rows], of costs [.., rows, columns]: whether no other row beats it (or equals it, coming earlier) in all."""
    order = np.arange(costs.shape[-2])
    no_worse: NDArray[np.bool_] = np.all(costs[..., :, None, :] <= costs[..., None, :, :], axis=-1)
    beats = no_worse & ~(no_worse.swapaxes(-1, -2) & (order[:, None] >= order))
    kept: NDArray[np.bool_] = ~np.any(beats, axis=-2)
    return kept
