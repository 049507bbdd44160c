"""Who holds which samples: shares of a micro-batch across a stage's width, and what must move at a boundary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """Samples [first, past_last) of a micro-batch, counted from its start, shared with peer number `peer`."""

    peer: int
    first: int
    past_last: int


def share(samples: int, width: int, index: int) -> tuple[int, int]:
    """Samples [first, past_last) of part `index` of `width`: even shares, in order."""
    return index * samples // width, (index + 1) * samples // width


def overlaps(samples: int, width: int, index: int, peers: int) -> tuple[Overlap, ...]:
    """What part `index` of `width` has in common with each of the `peers` parts on a boundary's other side."""
    first, past_last = share(samples, width, index)
    found = []
    for peer in range(peers):
        low, high = share(samples, peers, peer)
        if max(first, low) < min(past_last, high):
            found.append(Overlap(peer, max(first, low), min(past_last, high)))
    return tuple(found)
