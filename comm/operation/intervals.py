"""Who holds which interval of a vector: pure arithmetic behind every hierarchical collective, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

Interval = tuple[int, int]  # [first, past_last)
UNEVEN = 1.02  # what the most loaded of several ways may carry beside its share


@dataclass(frozen=True)
class IslandLayout:
    """The islands of one process group as this rank sees them; all ranks are ranks within the group."""

    rank: int
    islands: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        return sum(len(island) for island in self.islands)

    @cached_property
    def island_of(self) -> dict[int, int]:
        """Group rank -> index of its island."""
        return {rank: index for index, island in enumerate(self.islands) for rank in island}

    @property
    def home(self) -> int:
        """The index of this rank's island."""
        return self.island_of[self.rank]

    @property
    def mine(self) -> tuple[int, ...]:
        """The ranks of this rank's island."""
        return self.islands[self.home]

    @cached_property
    def place(self) -> int:
        """This rank's position within its island."""
        return self.mine.index(self.rank)

    @cached_property
    def foreign(self) -> tuple[int, ...]:
        """The indices of all other islands."""
        return tuple(i for i in range(len(self.islands)) if i != self.home)

    @cached_property
    def common_parts(self) -> int:
        """A count of elements that every island can share out evenly: lcm of their sizes."""
        return math.lcm(*(len(island) for island in self.islands))

    def local(self, rank: int) -> bool:
        """Whether `rank` lives in this rank's island."""
        return self.island_of[rank] == self.home


def shares(total: int, parts: int) -> tuple[Interval, ...]:
    """`total` cut into `parts` consecutive intervals whose lengths differ by at most one, longer ones first."""
    base, extra = divmod(total, parts)
    edges = [i * base + min(i, extra) for i in range(parts + 1)]
    return tuple((edges[i], edges[i + 1]) for i in range(parts))


def even(total: int, parts: int) -> list[Interval]:
    """`total` in `parts` intervals of one length, the last ones cut short: what a padded native share covers."""
    each = -(-total // parts)
    return [(min(i * each, total), min((i + 1) * each, total)) for i in range(parts)]


def edges(counts: Sequence[int]) -> list[Interval]:
    """Consecutive intervals of these lengths."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def meet(some: Sequence[Interval], others: Sequence[Interval]) -> bool:
    """Whether any two of them, one of each, have something in common."""
    return any(a < d and c < b for a, b in some for c, d in others)


def overlaps(mine: Interval, others: Sequence[Interval]) -> Iterator[tuple[int, Interval]]:
    """(index, common part) for each of `others` that shares elements with `mine`."""
    for index, other in enumerate(others):
        first, past = max(mine[0], other[0]), min(mine[1], other[1])
        if first < past:
            yield index, (first, past)


def pieces(total: int, most: int) -> Iterator[Interval]:
    """`total` cut into intervals of at most `most`; one empty interval when there is nothing."""
    if total == 0:
        yield (0, 0)
    for first in range(0, total, most):
        yield (first, min(first + most, total))


def spread(total: int, most: int, ways: int) -> list[Interval]:
    """`total` cut as by `pieces`; more finely where that loads ways which are taken in turn alike.

    Cuts are multiples of 64, which every size of an element divides, and at least a quarter of `most`.
    """
    cut = list(pieces(total, most))
    heaviest = max(sum(past - first for first, past in cut[way::ways]) for way in range(ways))
    if heaviest * ways <= UNEVEN * total:
        return cut
    each = -(-total // (-(-len(cut) // ways) * ways * 64)) * 64
    return list(pieces(total, each)) if 4 * each >= most else cut
