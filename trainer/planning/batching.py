"""Samples shared among unequal replicas: by largest remainder, or so that the slowest is as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import starmap, takewhile
from typing import Protocol

ROUNDS = 3  # of `settle`
MOVABLE = 1.05  # times a limit from which moves of few samples might still come to it
MOVES = 6
TABULATED = 16  # totals that are shared by looking at every share


def largest_remainder(total: int, weights: Sequence[float], *, least: int = 0) -> tuple[int, ...]:
    """`total` shared by weight, in whole numbers of at least `least` that add up; ties go to the earlier."""
    whole = sum(weights)
    free = total - least * len(weights)
    exact = [total * w / whole - least for w in weights]
    scale = free / sum(max(e, 0.0) for e in exact) if any(e < 0 for e in exact) else 1.0
    exact = [max(e, 0.0) * scale for e in exact]
    counts = [math.floor(e + 1e-9) for e in exact]
    order = sorted(range(len(weights)), key=lambda i: (round(counts[i] - exact[i], 9), i))
    for index in order[: free - sum(counts)]:
        counts[index] += 1
    return tuple(c + least for c in counts)


def divisors(number: int, *, apart: float = 1.0) -> list[int]:
    """All divisors, ascending; or 1, the number itself, and between them only such as are `apart` by a factor."""
    if apart > 1.0:
        kept = [1]
        for divisor in divisors(number)[1:]:
            if divisor >= apart * kept[-1] or divisor == number:
                kept.append(divisor)
        return kept
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


class Replicas(Protocol):
    """What balancing asks of unequal replicas about a share of the samples."""

    def seconds(self, replica: int, part: int) -> float:
        """The least time; infinity when it does not fit or is of no interest."""

    def alike(self, replica: int, found: int, part: int) -> float:
        """The time of a share in the arrangement that was found for another one; infinity where it does not fit."""

    def bound(self, replica: int, part: int, limit: float) -> float:
        """A lower bound on the time, at most `limit` where that is all that matters."""

    def faster(self, replica: int, part: int, limit: float) -> bool:
        """Whether the time is below a limit: cheaper to know than the time."""

    def most(self, replica: int, limit: float) -> int:
        """No larger share can take less than the limit, whatever the arrangement: what its devices compute."""


def balance(
    total: int,
    weights: Sequence[float],
    replicas: Replicas,
    *,
    limit: float = math.inf,
    tabulate: bool = True,
    tolerance: float = 0.0,
) -> tuple[tuple[int, ...], float] | None:
    """Shares (at least 1 each) that add up to `total` and make the slowest replica as fast as possible.

    Exact for totals up to TABULATED if these are to be tabulated, and otherwise where a replica's shares below a
    time form an interval: too few samples may not fit into memory (they cannot be spread over many ranks), more
    samples take longer. Improvements smaller than the (relative) tolerance are not looked for.
    None when nothing is faster than `limit`.
    """
    if total < len(weights):
        return None
    if total <= TABULATED and tabulate:
        return _tabulated(total, len(weights), replicas, limit)
    shares = largest_remainder(total, weights, least=1)
    best: tuple[tuple[int, ...], float] | None = None
    while True:
        if all(replicas.faster(i, s, limit) for i, s in enumerate(shares)):
            slowest = max(replicas.seconds(i, s) for i, s in enumerate(shares))
            best, limit = (shares, slowest), slowest
        proposed = _proposal(total, len(weights), replicas, limit * (1 - tolerance), tolerance)
        if proposed is None or proposed == shares:
            return best
        shares = proposed


def settle(
    total: int, weights: Sequence[float], replicas: Replicas, *, limit: float
) -> tuple[tuple[int, ...], float] | None:
    """Shares by weight, then by the paces that these shares showed, then moved from the slowest while that helps.

    Near `balance`, and far cheaper: each round asks for the replicas at its shares once, and what else these could take
    is told of the same arrangements. None where the first shares do not fit, or their paces leave no hope of `limit`.
    """
    best: tuple[tuple[int, ...], float] | None = None
    shares = largest_remainder(total, weights, least=1)
    for _ in range(ROUNDS):
        seconds = list(takewhile(math.isfinite, starmap(replicas.seconds, enumerate(shares))))
        if len(seconds) < len(shares):
            break
        if best is None or max(seconds) < best[1]:
            best = shares, max(seconds)
        paces = [share / s for share, s in zip(shares, seconds, strict=True)]
        if total / sum(paces) >= min(limit * MOVABLE, best[1]):
            break
        following = _moved(largest_remainder(total, paces, least=1), shares, replicas)
        if following == shares:
            break
        shares = following
    return best if best is not None and best[1] < limit * MOVABLE else None


def _moved(shares: tuple[int, ...], found: tuple[int, ...], replicas: Replicas) -> tuple[int, ...]:
    """Parts go from the slowest replica to the one that then takes least, some at once: whole samples make steps.

    Times are those of the arrangements that were `found` for other shares.
    """
    seconds_of = cache(lambda i, part: replicas.alike(i, found[i], part))
    seconds = list(starmap(seconds_of, enumerate(shares)))
    for _ in range(MOVES):
        slowest = max(range(len(shares)), key=lambda i: seconds[i])
        moves = [
            (max(seconds_of(slowest, shares[slowest] - n), seconds_of(i, shares[i] + n)), i, n)
            for i in sorted(range(len(shares)), key=lambda i: seconds[i])[:2]
            for n in (1, 2, 4)
            if n < shares[slowest] and i != slowest
        ]
        slower, other, n = min(moves, default=(math.inf, 0, 0))
        if slower >= seconds[slowest]:
            break
        shares = tuple(s + n * ((i == other) - (i == slowest)) for i, s in enumerate(shares))
        seconds = list(starmap(seconds_of, enumerate(shares)))
    return shares


def _proposal(total: int, count: int, replicas: Replicas, limit: float, tolerance: float) -> tuple[int, ...] | None:
    """Shares that all take less than the limit, as far as intervals tell; None when there are none."""
    caps = [min(replicas.most(i, limit), total - count + 1) for i in range(count)]
    lowest, highest = [], caps
    for index, cap in enumerate(caps):
        faster = partial(replicas.faster, index, limit=limit)
        need = max(total - sum(highest) + cap, 1)  # with less, what the others can take would not reach the total
        if need > cap:
            return None
        inside = next((s for s in dict.fromkeys((need, (need + cap) // 2, cap)) if faster(s)), None)
        if inside is None:
            return None
        lowest.append(_edge(faster, inside, need - 1, tolerance))
        highest[index] = _edge(faster, inside, cap + 1, tolerance)
    if not sum(lowest) <= total <= sum(highest):
        return None
    return _within(list(zip(lowest, highest, strict=True)), total)


def _tabulated(total: int, count: int, replicas: Replicas, limit: float) -> tuple[tuple[int, ...], float] | None:
    """The same over all shares: the best by lower bounds, whose times are then made exact, until they all are."""
    most = total - count + 1
    times = [[math.inf, *(replicas.bound(i, s, limit) for s in range(1, most + 1))] for i in range(count)]
    exact: set[tuple[int, int]] = set()
    while True:
        slowest, shares = _least_slowest(total, times)
        if slowest >= limit:
            return None
        open_ = [(i, part) for i, part in enumerate(shares) if (i, part) not in exact]
        if not open_:
            return shares, slowest
        index, part = max(open_, key=lambda pair: times[pair[0]][pair[1]])
        times[index][part] = replicas.seconds(index, part)
        exact.add((index, part))


def _least_slowest(total: int, times: Sequence[Sequence[float]]) -> tuple[float, tuple[int, ...]]:
    """By a dynamic program over replicas and samples used; of equal times the first."""
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (total + 1)
    best[0] = (0.0, ())
    for index, mine in enumerate(times):
        rest = len(times) - index - 1
        following: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (total + 1)
        for used, (slowest, shares) in enumerate(best):
            for part in range(1, min(total - used - rest, len(mine) - 1) + 1) if slowest < math.inf else ():
                if max(slowest, mine[part]) < following[used + part][0]:
                    following[used + part] = (max(slowest, mine[part]), (*shares, part))
        best = following
    return best[total]


def _within(ranges: Sequence[tuple[int, int]], total: int) -> tuple[int, ...]:
    """Shares within their ranges that add up to `total`, every range filled alike."""
    free = total - sum(low for low, _ in ranges)
    rooms = [high - low for low, high in ranges]
    parts = list(largest_remainder(free, rooms)) if sum(rooms) else [0] * len(ranges)
    parts = [min(p, room) for p, room in zip(parts, rooms, strict=True)]
    for i, room in enumerate(rooms):
        parts[i] += min(room - parts[i], free - sum(parts))
    return tuple(low + part for (low, _), part in zip(ranges, parts, strict=True))


def _edge(faster: Callable[[int], bool], inside: int, outside: int, tolerance: float) -> int:
    """The last fast enough share between one inside and one outside, to a tolerance; doubling steps, then bisection."""
    direction, step = (1 if outside > inside else -1), 1
    while abs(outside - inside) > step and faster(inside + direction * step):
        inside, step = inside + direction * step, step * 2
    if abs(outside - inside) > step:
        outside = inside + direction * step
    while abs(outside - inside) > max(1, int(tolerance * inside)):
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if faster(middle) else (inside, middle)
    return inside
