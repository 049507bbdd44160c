"""Which stage takes how many layers: an exact dynamic program over stages under memory, and two simpler rules.

All blocks of a model are alike, so a stage is described by tables over its number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageTable:
    """One stage: entry [mode, k] holds for k layers; infinity where that mode does not fit into memory.

    `beat` is seconds of one micro-batch (forward and backward), `end` seconds once a step (synchronising
    gradients that backward does not hide, optimiser).
    """

    beat: Floats  # [modes, layers + 1]
    end: Floats  # [modes, layers + 1]

    def load(self, micro_batches: int) -> Floats:
        """Seconds beyond the first micro-batch: what the slowest stage adds to a step."""
        fits = np.isfinite(self.beat)
        return np.where(fits, (micro_batches - 1) * np.where(fits, self.beat, 0.0) + self.end, np.inf)


@dataclass(frozen=True)
class Split:
    """Layers and mode (an index into the tables' first axis) per stage, and the time the rule below gives."""

    layers: tuple[int, ...]
    modes: tuple[int, ...]
    seconds: float


def best_split(tables: Sequence[StageTable], layers: int, *, micro_batches: int, bound: float = np.inf) -> Split | None:
    """The split with the least `sum(beat) + max((m - 1) beat + end)` (FACTS: overlapped iteration time).

    Exact: for each threshold on the slowest stage, smallest first, a dynamic program minimises the sum of beats
    among stages under the threshold; it ends when the threshold alone is no better than the best found.
    None when nothing fits, or nothing is faster than `bound`.
    """
    loads = [t.load(micro_batches) for t in tables]
    choices = np.unique(np.concatenate([load[np.isfinite(load)].ravel() for load in loads]))
    if not len(choices):
        return None
    first = _first_feasible(choices, loads, layers)
    least = _least_sum(tables, loads, layers, np.inf)
    if first is None or least is None:
        return None
    best: Split | None = None
    for threshold in choices[first:]:
        if threshold + least[0] >= bound:
            break
        found = _least_sum(tables, loads, layers, float(threshold))
        if found is None:
            continue
        total = found[0] + max(float(load[mode, k]) for load, k, mode in zip(loads, found[1], found[2], strict=True))
        if total < bound:
            best, bound = Split(found[1], found[2], total), total
    return best


def split_seconds(
    tables: Sequence[StageTable], layers: Sequence[int], modes: Sequence[int], *, micro_batches: int
) -> float:
    """The rule's time of one given split; infinity where it does not fit."""
    beats = [float(t.beat[m, k]) for t, m, k in zip(tables, modes, layers, strict=True)]
    ends = [float(t.end[m, k]) for t, m, k in zip(tables, modes, layers, strict=True)]
    return sum(beats) + max((micro_batches - 1) * b + e for b, e in zip(beats, ends, strict=True))


def fixed_split(tables: Sequence[StageTable], layers: Sequence[int], *, micro_batches: int) -> Split | None:
    """The best modes for layers given by hand. None when they do not fit."""
    only = []
    for table, count in zip(tables, layers, strict=True):
        keep = np.full(table.beat.shape, np.inf)
        keep[:, count] = 0.0
        only.append(StageTable(table.beat + keep, table.end + keep))
    return best_split(only, sum(layers), micro_batches=micro_batches)


def uniform_layers(stages: int, layers: int) -> tuple[int, ...]:
    """Equal shares; the first stages take the remainder."""
    return tuple(layers // stages + (i < layers % stages) for i in range(stages))


def holmes_layers(speeds: Sequence[float], layers: int, *, alpha: float = 1.0) -> tuple[int, ...]:
    """Holmes' rule (arXiv 2312.03549): floor(alpha S_i / sum(S) N) layers, the remainder to the last stage."""
    total = sum(speeds)
    # the small addend keeps exact shares (such as 0.5 x 30) from falling through floor
    counts = [int(alpha * s / total * layers + 1e-9) for s in speeds[:-1]]
    return (*counts, layers - sum(counts))


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` shared by weight, in whole numbers that add up; ties go to the earlier."""
    whole = sum(weights)
    exact = [total * w / whole for w in weights]
    counts = [int(e) for e in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


def _first_feasible(choices: Floats, loads: Sequence[Floats], layers: int) -> int | None:
    """Index of the least threshold under which the layers can be placed at all (bisection).

    Sums of feasible counts may have gaps, so this is a start from below: the sum of largest counts only.
    """

    def reach(threshold: float) -> int:
        total = 0
        for load in loads:
            fits = np.flatnonzero((load[:, 1:] <= threshold).any(axis=0))
            if not len(fits):
                return -1
            total += int(fits[-1]) + 1
        return total

    low, high = 0, len(choices) - 1
    if reach(float(choices[high])) < layers:
        return None
    while low < high:
        middle = (low + high) // 2
        if reach(float(choices[middle])) >= layers:
            high = middle
        else:
            low = middle + 1
    return low


def _least_sum(
    tables: Sequence[StageTable], loads: Sequence[Floats], layers: int, threshold: float
) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
    """(sum of beats, layers, modes) of the least sum with every stage's load within the threshold."""
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    takes: list[NDArray[np.int64]] = []
    modes: list[NDArray[np.int64]] = []
    shift = np.arange(layers + 1)[:, None] - np.arange(layers + 1)[None, :]
    for table, load in zip(tables, loads, strict=True):
        allowed = np.where(load <= threshold, table.beat, np.inf)
        allowed[:, 0] = np.inf
        mode = allowed.argmin(axis=0)
        beat = allowed.min(axis=0)
        reach = np.where(shift >= 0, best[shift], np.inf) + beat[None, :]
        take = reach.argmin(axis=1)
        best = reach[np.arange(layers + 1), take]
        takes.append(take)
        modes.append(mode)
    if not np.isfinite(best[layers]):
        return None
    counts, chosen, left = [], [], layers
    for take, mode in zip(reversed(takes), reversed(modes), strict=True):
        count = int(take[left])
        counts.append(count)
        chosen.append(int(mode[count]))
        left -= count
    return float(best[layers]), tuple(reversed(counts)), tuple(reversed(chosen))
