"""Shares of a micro-batch: every sample has one owner on each side, and every pair agrees on what moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.trainer.model.sample_shares import overlaps, share

widths = st.integers(1, 9)


@given(st.integers(1, 60), widths)
def test_shares_cover_every_sample_once_and_evenly(samples: int, width: int) -> None:
    spans = [share(samples, width, i) for i in range(width)]
    assert [s for a, b in spans for s in range(a, b)] == list(range(samples))
    sizes = [b - a for a, b in spans]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), widths, widths)
def test_both_sides_of_a_boundary_agree(samples: int, left: int, right: int) -> None:
    sent = {(i, o.peer, o.first, o.past_last) for i in range(left) for o in overlaps(samples, left, i, right)}
    received = {(o.peer, j, o.first, o.past_last) for j in range(right) for o in overlaps(samples, right, j, left)}
    assert sent == received
    assert sum(b - a for _, _, a, b in sent) == samples


def test_one_to_two_and_two_to_three() -> None:
    assert [(o.peer, o.first, o.past_last) for o in overlaps(4, 1, 0, 2)] == [(0, 0, 2), (1, 2, 4)]
    assert [(o.peer, o.first, o.past_last) for o in overlaps(6, 2, 1, 3)] == [(1, 3, 4), (2, 4, 6)]
