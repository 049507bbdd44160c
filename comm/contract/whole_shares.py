"""How many pieces of work, such as samples or micro-batches, each of several unequal workers takes. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def ended_soonest(total: int, turns: Sequence[float], depths: Sequence[int]) -> list[int]:
    """Pieces of each worker, one at least, so that the slowest ends as soon as whole pieces allow.

    Of m pieces a worker of depth p is done after (m + p - 1) of its turns. Each further piece goes to whoever would be
    done first with it; of equals to the first.
    """
    counts = [1] * len(turns)
    queue = [((1 + depth) * turn, index) for index, (turn, depth) in enumerate(zip(turns, depths, strict=True))]
    heapq.heapify(queue)
    for _ in range(total - len(turns)):
        index = queue[0][1]
        counts[index] += 1
        heapq.heapreplace(queue, ((counts[index] + depths[index]) * turns[index], index))
    return counts
