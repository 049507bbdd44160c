"""Which rails of two ends go together."""

from __future__ import annotations

import pytest

from hetctl.comm.rails import MAIN, paired


@pytest.mark.parametrize(
    ("to", "back", "wanted"),
    [
        ([""] * 2, [""] * 3, [(0, 0), (1, 1), (0, 2)]),
        (["a", "b"], ["a", "b"], [(0, 0), (1, 1)]),
        (["a", "b"], ["b", "a"], [(0, 1), (1, 0)]),
        (["a", "a", "b", "b"], ["a", "b"], [(0, 0), (2, 1), (1, 0), (3, 1)]),  # networks in turn
        (["a", "b"], ["b"], [(1, 0)]),  # what the other end does not reach carries nothing
        (["a", "b"], ["", ""], [(MAIN, MAIN)] * 2),
        (["a"], ["b", "c"], [(MAIN, MAIN)] * 2),
    ],
)
def test_ends_meet_within_the_networks_they_share(
    to: list[str], back: list[str], wanted: list[tuple[int, int]]
) -> None:
    assert paired(to, back) == wanted
