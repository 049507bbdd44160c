"""Which port of one end goes with which port of the other: those in one network, both ends saying the same."""

from __future__ import annotations

from collections.abc import Sequence


def pairs(mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int]]:
    """Numbers of ports that go together, from the network of each port; every port in a shared network is in one.

    Where a network has more ports at one end, those of the other end serve several. Where either end does not name
    its networks, all ports count as in one. The other end gets the same pairs, turned round, in the same order.
    """
    if "" in mine or "" in theirs:
        mine, theirs = [""] * len(mine), [""] * len(theirs)
    found = []
    for network in sorted(set(mine) & set(theirs)):
        here = [i for i, name in enumerate(mine) if name == network]
        there = [i for i, name in enumerate(theirs) if name == network]
        found += [(here[k % len(here)], there[k % len(there)]) for k in range(max(len(here), len(there)))]
    return found
