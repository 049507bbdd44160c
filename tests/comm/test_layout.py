"""Interval arithmetic: every element has exactly one holder, whatever the counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.layout import Layout, overlaps, pieces, shares


@given(st.integers(0, 1000), st.integers(1, 17))
def test_shares_tile_the_whole_and_differ_by_at_most_one(total: int, parts: int) -> None:
    cut = shares(total, parts)
    assert [i for first, past in cut for i in range(first, past)] == list(range(total))
    lengths = {past - first for first, past in cut}
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 9))
def test_overlaps_of_one_cutting_with_another_cover_each_share(total: int, ours: int, theirs: int) -> None:
    for mine in shares(total, ours):
        found = [i for _, (first, past) in overlaps(mine, shares(total, theirs)) for i in range(first, past)]
        assert found == list(range(*mine))


@given(st.integers(0, 300), st.integers(1, 50))
def test_pieces_are_bounded_and_nothing_is_one_empty_piece(total: int, most: int) -> None:
    cut = list(pieces(total, most))
    assert cut
    assert all(past - first <= most for first, past in cut)
    assert [i for first, past in cut for i in range(first, past)] == list(range(total))


def test_a_layout_knows_home_place_and_strangers() -> None:
    layout = Layout(3, ((0, 1, 2), (3, 4)))
    assert (layout.size, layout.home, layout.place, layout.foreign) == (5, 1, 0, (0,))
    assert layout.local(4)
    assert not layout.local(2)
    assert layout.common_parts == 6
