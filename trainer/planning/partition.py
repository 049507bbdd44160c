"""Which stage takes how many layers: an exact dynamic program over stages under memory, and two simpler rules.

All blocks of a model are alike, so a stage is described by tables over its number of layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

WORTH_CAPPING = 0.01  # share of a step that its ends take, from which on ends are weighed against turns
CAPS = 5
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
    """The split with the least `sum(beat) + max(floor, (m - 1) max(turn)) + max(end)`: all wait for each other's ends.

    Under a threshold on turns a dynamic program from the last stage on minimises the sum of beats. That least sum never
    grows with the threshold, so spans of thresholds are halved until none can be better (by more than the relative
    `tolerance`). The same for ends capped ever less tightly, while that could gain. Exact where nothing waits for
    round trips and ends are alike. None when nothing fits, or nothing is faster than `bound`.
    """
    further, best = micro_batches - 1, None
    least = _sum_bound(tables, layers)
    if least + floor >= bound:
        return None
    turns = _thresholds(tables, least)
    start = _first_feasible(turns, tables, layers)
    if start == len(turns):
        return None
    least += max(floor, further * float(turns[start]))
    for ends, cap in pairwise(_caps(tables, least, rough=tolerance >= ROUGH)):
        if least + ends >= bound:
            break
        found = _best_below(_capped(tables, cap), layers, further, floor, bound, tolerance, ends=ends)
        if found is not None:
            best, bound = found, found.seconds
    return best


def _caps(tables: Sequence[StageTable], seconds: float, *, rough: bool) -> list[float]:
    """Ends to weigh against turns: nobody's are below the first, and what a round allows anew is above its first.

    `seconds`: least of a step without its end. A few are enough, since layers are moved one by one afterwards.
    """
    ends = [t.end[:, 1:][np.isfinite(t.end[:, 1:])] for t in {id(t): t for t in tables}.values()]
    lowest, highest = max(float(e.min()) for e in ends), max(float(e.max()) for e in ends)
    if rough or highest - lowest < WORTH_CAPPING * seconds:
        return [lowest, np.inf]
    first = max(lowest, WORTH_CAPPING * seconds)
    return [lowest, *np.geomspace(first, highest, CAPS)[:-1].tolist(), np.inf]


def _capped(tables: Sequence[StageTable], cap: float) -> list[StageTable]:
    """Without what ends later; equal stages stay one object."""
    if cap == np.inf:
        return list(tables)
    made = {id(t): StageTable(np.where(t.end <= cap, t.beat, np.inf), t.end, t.in_flight, t.trip_s) for t in tables}
    return [made[id(t)] for t in tables]


def _best_below(
    tables: Sequence[StageTable],
    layers: int,
    further: int,
    floor: float,
    bound: float,
    tolerance: float,
    *,
    ends: float,
) -> Split | None:
    """The same, where the last stage to end takes at least so long for that."""
    least = _sum_bound(tables, layers)
    if least + floor + ends >= bound:
        return None
    thresholds = _thresholds(tables, least) if np.isfinite(least) else np.zeros(0)
    if not further:
        thresholds = thresholds[-1:]
    thresholds = thresholds[further * thresholds < bound - least - ends]
    start = _first_feasible(thresholds, tables, layers)
    # (first, last) thresholds still to be looked at, and a sum of beats that none of them goes below
    spans = [(start, len(thresholds) - 1, least)]
    best: Split | None = None
    while spans:
        first, last, sum_below = spans.pop()
        if first > last or max(floor, further * float(thresholds[first])) + sum_below + ends >= bound * (1 - tolerance):
            continue
        middle = last if last == len(thresholds) - 1 else (first + last) // 2  # the loosest first
        found = _least_sum(tables, layers, float(thresholds[middle]))
        spans.append((middle + 1, last, sum_below))
        if found is None:
            continue  # nor is there a split under any smaller threshold
        split, turn = _split(tables, *found[1:], further, floor)
        tighter = min(int(np.searchsorted(thresholds, turn * (1 - 1e-12))), middle)  # up to there it is the same split
        spans.append((first, tighter - 1, max(found[0], sum_below)))
        if split.seconds < bound:
            best, bound = split, split.seconds
            if tolerance >= ROUGH:  # others are taken to end alike
                ends = max(float(t.end[r, k]) for t, r, k in zip(tables, split.rows, split.layers, strict=True))
    return best


def _thresholds(tables: Sequence[StageTable], least: float) -> Floats:
    """Turns worth trying, ascending: all beats, and round trips of the `least` sum of beats or somewhat more."""
    known = {id(t): t.beat[:, 1:].ravel() for t in tables}
    beats = np.concatenate(list(known.values()))
    waits = [(least + t.trip_s) / t.in_flight * TRIPS for t in tables if t.in_flight < np.inf]
    found: Floats = np.unique(np.concatenate([beats[np.isfinite(beats)], *waits]))
    return found


def _split(
    tables: Sequence[StageTable], layers: tuple[int, ...], rows: tuple[int, ...], further: int, floor: float
) -> tuple[Split, float]:
    """The split, timed, and its longest turn."""
    held = list(zip(tables, rows, layers, strict=True))
    beats = [float(t.beat[r, k]) for t, r, k in held]
    trips = list(accumulate(reversed(beats)))[::-1]
    turns = [max(b, (s + t.trip_s) / t.in_flight) for b, s, t in zip(beats, trips, tables, strict=True)]
    ends = max(float(t.end[r, k]) for t, r, k in held)
    return Split(layers, rows, sum(beats) + max(floor, further * max(turns)) + ends), max(turns)


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


def _sum_bound(tables: Sequence[StageTable], layers: int) -> float:
    """No sum of beats is less: each stage at its best for a price per layer, and all layers at that price."""
    counts = np.arange(1, layers + 1)
    beats = {id(t): t.beat[:, 1:].min(axis=0) for t in tables}
    price = min(float((beat / counts).min()) for beat in beats.values())
    if not np.isfinite(price):
        return np.inf
    spare = {key: float((beat - price * counts).min()) for key, beat in beats.items()}
    return sum(spare[id(t)] for t in tables) + price * layers


def _first_feasible(thresholds: Floats, tables: Sequence[StageTable], layers: int) -> int:
    """Index of the first threshold under which the stages' largest counts together reach all layers (bisection)."""
    least = {}
    for table in tables:
        whole = table.beat[:, 1:].min(axis=0)
        least[id(table)] = np.minimum.accumulate(whole[::-1])[::-1]
    times = Counter(id(t) for t in tables)

    def reaches(threshold: float) -> bool:
        total = 0
        for key, count in times.items():
            most = int(least[key].searchsorted(threshold, side="right"))
            if not most:
                return False
            total += count * most
        return total >= layers

    return bisect_left(range(len(thresholds)), True, key=lambda index: reaches(float(thresholds[index])))


def _least_sum(
    tables: Sequence[StageTable], layers: int, threshold: float
) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
    """(sum of beats, layers, rows) of the least sum with every stage's turns within the threshold."""
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    takes: list[Whole] = []
    rows: list[Whole] = []
    index = np.arange(layers + 1)
    ways: dict[int, tuple[Floats, Whole, Whole]] = {}
    for table in reversed(tables):
        if id(table) not in ways:
            way = _within(table, threshold)
            if way is None:
                return None
            left = index[:, None] - np.arange(1, len(way[0]) + 1)[None, :]
            ways[id(table)] = (*way, left)
        beat, row, left = ways[id(table)]
        reach = np.where(left >= 0, best[left], np.inf) + beat
        if table.in_flight < np.inf:
            reach[reach > (table.in_flight * threshold - table.trip_s) * ROUNDING] = np.inf
        take = reach.argmin(axis=1)
        best = reach[index, take]
        takes.append(take + 1)
        rows.append(row)
    if not np.isfinite(best[layers]):
        return None
    counts: list[int] = []
    chosen: list[int] = []
    rest = layers
    for take, row in zip(reversed(takes), reversed(rows), strict=True):  # the first stage took last
        count = int(take[rest])
        counts.append(count)
        chosen.append(int(row[count - 1]))
        rest -= count
    return float(best[layers]), tuple(counts), tuple(chosen)


def _within(table: StageTable, threshold: float) -> tuple[Floats, Whole] | None:
    """(least beats, their rows) for 1, 2, .. layers, up to the most layers under the threshold."""
    allowed = table.beat[:, 1:] <= threshold
    fits = np.flatnonzero(allowed.any(axis=0))
    if not len(fits):
        return None
    most = int(fits[-1]) + 1
    beats = np.where(allowed[:, :most], table.beat[:, 1 : most + 1], np.inf)
    row = beats.argmin(axis=0)
    return beats[row, np.arange(most)], row
