"""Samples shared among unequal replicas: by largest remainder, or so that the slowest is as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Seconds = Callable[[int, int], float]  # (replica, share) -> seconds, infinity when it does not fit
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


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def balance(
    total: int, weights: Sequence[float], seconds: Seconds, *, limit: float = math.inf
) -> tuple[tuple[int, ...], float] | None:
    """Shares (at least 1 each) that add up to `total` and make the slowest replica as fast as possible.

    Exact for totals up to TABULATED, and beyond where a replica's shares below a time form an interval: too few
    samples may not fit into memory (they cannot be spread over many ranks), more samples take longer.
    None when nothing is faster than `limit`.
    """
    if total < len(weights):
        return None
    if total <= TABULATED:
        return _tabulated(total, len(weights), seconds, limit)
    shares = largest_remainder(total, weights, least=1)
    best: tuple[tuple[int, ...], float] | None = None
    while True:
        slowest = max(seconds(i, s) for i, s in enumerate(shares))
        if slowest < limit:
            best, limit = (shares, slowest), slowest
        elif best is not None and shares != best[0]:
            return best
        ranges = [_below(_of(seconds, i), limit, shares[i], total) for i in range(len(weights))]
        if None in ranges:
            return best
        known = [r for r in ranges if r is not None]
        if not sum(low for low, _ in known) <= total <= sum(high for _, high in known):
            return best
        proposed = _within(known, total)
        if proposed == shares:
            return best
        shares = proposed


def _of(seconds: Seconds, index: int) -> Callable[[int], float]:
    return lambda part: seconds(index, part)


def _tabulated(total: int, count: int, seconds: Seconds, limit: float) -> tuple[tuple[int, ...], float] | None:
    """The same by a dynamic program over all shares; of equal times the first."""
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (total + 1)
    best[0] = (0.0, ())
    for index in range(count):
        rest = count - index - 1
        times = [math.inf] + [seconds(index, s) for s in range(1, total - count + 2)]
        following: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (total + 1)
        for used, (slowest, shares) in enumerate(best):
            for part in range(1, total - used - rest + 1) if slowest < limit else ():
                if part < len(times) and max(slowest, times[part]) < following[used + part][0]:
                    following[used + part] = (max(slowest, times[part]), (*shares, part))
        best = following
    slowest, shares = best[total]
    return (shares, slowest) if slowest < limit else None


def _within(ranges: Sequence[tuple[int, int]], total: int) -> tuple[int, ...]:
    """Shares within their ranges that add up to `total`, every range filled alike."""
    free = total - sum(low for low, _ in ranges)
    rooms = [high - low for low, high in ranges]
    parts = list(largest_remainder(free, rooms)) if sum(rooms) else [0] * len(ranges)
    parts = [min(p, room) for p, room in zip(parts, rooms, strict=True)]
    for i, room in enumerate(rooms):
        parts[i] += min(room - parts[i], free - sum(parts))
    return tuple(low + part for (low, _), part in zip(ranges, parts, strict=True))


def _below(seconds: Callable[[int], float], limit: float, start: int, total: int) -> tuple[int, int] | None:
    """The interval of shares that take less than `limit`, found outwards from `start`; None when there is none."""
    inside = next((s for s in _outwards(start, total) if seconds(s) < limit), None)
    if inside is None:
        return None
    return _edge(seconds, limit, inside, 0), _edge(seconds, limit, inside, total + 1)


def _outwards(start: int, total: int) -> list[int]:
    """`start`, then shares ever farther below and above it."""
    steps = [1 << k for k in range(total.bit_length())]
    around = [start, *(s for step in steps for s in (start - step, start + step))]
    return [s for s in around if 1 <= s <= total]


def _edge(seconds: Callable[[int], float], limit: float, inside: int, outside: int) -> int:
    """The last share below the limit between one inside and one outside; doubling steps, then bisection."""
    direction, step = (1 if outside > inside else -1), 1
    while abs(outside - inside) > step and seconds(inside + direction * step) < limit:
        inside, step = inside + direction * step, step * 2
    if abs(outside - inside) > step:
        outside = inside + direction * step
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if seconds(middle) < limit else (inside, middle)
    return inside
