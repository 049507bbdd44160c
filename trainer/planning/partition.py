"""Which stage takes how many layers: an exact dynamic program over stages under memory, and two simpler rules.

All blocks of a model are alike, so a stage is described by tables over its number of layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageTable:
    """One stage: entry [row, k] holds for k layers; infinity where that row's way does not fit into memory.

    `beat` is seconds of one micro-batch (forward and backward), `end` seconds once a step (gradient sums that
    backward does not hide, optimiser). A micro-batch's way to the last stage and back may take longer than the
    forwards in flight cover: then the stage turns round in `ratio * beat + wait` instead of its beat.
    """

    beat: Floats  # [rows, layers + 1]
    end: Floats  # [rows, layers + 1]
    ratio: float = 1.0
    wait: float = 0.0

    def load(self, micro_batches: int) -> Floats:
        """Seconds beyond the first micro-batch: what the slowest stage adds to a step."""
        fits = np.isfinite(self.beat)
        beat = np.where(fits, self.beat, 0.0)
        turn = np.maximum(beat, self.ratio * beat + self.wait)
        return np.where(fits, (micro_batches - 1) * turn + self.end, np.inf)


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
    """The split with the least `sum(beat) + max(floor, (m - 1) turn + end)` (FACTS: iteration time).

    Exact: under a threshold on the slowest stage a dynamic program minimises the sum of beats. That least sum never
    grows with the threshold, so spans of thresholds are halved until their first threshold and the least sum of
    what lies above it are no better than the best found (or not by more than the relative `tolerance`).
    None when nothing fits, or nothing is faster than `bound`.
    """
    known = {id(t): t.load(micro_batches) for t in tables}
    loads = [known[id(t)] for t in tables]
    least = _sum_bound(tables, layers)
    if least + floor >= bound:
        return None
    values = np.concatenate([load[:, 1:].ravel() for load in known.values()])
    thresholds = np.unique(values[values < bound - least])
    start = _first_feasible(thresholds, tables, known, layers)
    # (first, last) thresholds still to be looked at, and a sum of beats that none of them goes below
    spans = [(start, len(thresholds) - 1, least)]
    best: Split | None = None
    while spans:
        first, last, sum_below = spans.pop()
        if first > last or max(floor, float(thresholds[first])) + sum_below >= bound * (1 - tolerance):
            continue
        middle = last if last == len(thresholds) - 1 else (first + last) // 2  # the loosest first
        found = _least_sum(tables, loads, layers, float(thresholds[middle]))
        spans.append((middle + 1, last, sum_below))
        if found is None:
            continue  # nor is there a split under any smaller threshold
        spans.append((first, middle - 1, max(found[0], sum_below)))
        split = _split(found, loads, floor)
        if split.seconds < bound:
            best, bound = split, split.seconds
    return best


def _split(found: tuple[float, tuple[int, ...], tuple[int, ...]], loads: Sequence[Floats], floor: float) -> Split:
    total, layers, rows = found
    slowest = max(float(load[r, k]) for load, k, r in zip(loads, layers, rows, strict=True))
    return Split(layers, rows, total + max(floor, slowest))


def fixed_split(
    tables: Sequence[StageTable], layers: Sequence[int], *, micro_batches: int, floor: float = 0.0
) -> Split | None:
    """The best rows for layers given by hand. None when they do not fit."""
    only = []
    for table, count in zip(tables, layers, strict=True):
        keep = np.full(table.beat.shape, np.inf)
        keep[:, count] = 0.0
        only.append(StageTable(table.beat + keep, table.end + keep, table.ratio, table.wait))
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


def _first_feasible(thresholds: Floats, tables: Sequence[StageTable], loads: Mapping[int, Floats], layers: int) -> int:
    """Index of the first threshold under which the stages' largest counts together reach all layers (bisection)."""
    least = {}
    for key, load in loads.items():
        whole = load[:, 1:].min(axis=0)
        least[key] = np.minimum.accumulate(whole[::-1])[::-1]
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
    tables: Sequence[StageTable], loads: Sequence[Floats], layers: int, threshold: float
) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
    """(sum of beats, layers, rows) of the least sum with every stage's load within the threshold."""
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    takes: list[Whole] = []
    rows: list[Whole] = []
    index = np.arange(layers + 1)
    ways: dict[int, tuple[Floats, Whole, Whole]] = {}
    for table, load in zip(tables, loads, strict=True):
        if id(table) not in ways:
            way = _within(table, load, threshold)
            if way is None:
                return None
            left = index[:, None] - np.arange(1, len(way[0]) + 1)[None, :]
            ways[id(table)] = (*way, left)
        beat, row, left = ways[id(table)]
        reach = np.where(left >= 0, best[left], np.inf) + beat
        take = reach.argmin(axis=1)
        best = reach[index, take]
        takes.append(take + 1)
        rows.append(row)
    if not np.isfinite(best[layers]):
        return None
    counts: list[int] = []
    chosen: list[int] = []
    rest = layers
    for take, row in zip(reversed(takes), reversed(rows), strict=True):
        count = int(take[rest])
        counts.append(count)
        chosen.append(int(row[count - 1]))
        rest -= count
    return float(best[layers]), tuple(reversed(counts)), tuple(reversed(chosen))


def _within(table: StageTable, load: Floats, threshold: float) -> tuple[Floats, Whole] | None:
    """(least beats, their rows) for 1, 2, .. layers, up to the most layers under the threshold."""
    allowed = load[:, 1:] <= threshold
    fits = np.flatnonzero(allowed.any(axis=0))
    if not len(fits):
        return None
    most = int(fits[-1]) + 1
    beats = np.where(allowed[:, :most], table.beat[:, 1 : most + 1], np.inf)
    row = beats.argmin(axis=0)
    return beats[row, np.arange(most)], row
