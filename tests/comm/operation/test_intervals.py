"""Interval arithmetic: every element has exactly one holder, whatever the counts."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from hetctl.comm.bridge import shm, tcp
from hetctl.comm.group.collectives import SLOT_BYTES, span_bytes
from hetctl.comm.operation.intervals import UNEVEN, IslandLayout, overlaps, pieces, shares, spread


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


@given(st.integers(0, 1 << 20), st.integers(1, 64), st.integers(1, 8))
def test_chunks_are_spread_evenly_over_rails_and_never_larger(total: int, most: int, ways: int) -> None:
    most *= 1024
    cut = spread(total, most, ways)
    assert [first for first, _ in cut] == [0, *(past for _, past in cut[:-1])]
    assert cut[-1][1] == total
    assert all(past - first <= most and not first % 64 for first, past in cut)
    heaviest = max(sum(past - first for first, past in cut[way::ways]) for way in range(ways))
    if total >= ways * most:  # enough to choose: a few bytes of rounding a chunk apart
        assert heaviest * ways <= UNEVEN * total + 64 * ways * len(cut)


def test_a_message_of_61_chunks_does_not_keep_one_of_four_rails_longer() -> None:
    cut = spread(256_000_000, 4 << 20, 4)
    assert len(cut) == 64
    assert {past - first for first, past in cut} == {4_000_000}
    assert spread(256_000_000, 4 << 20, 1) == list(pieces(256_000_000, 4 << 20))


@given(st.integers(0, 1 << 30))
@example((32 << 20) + 1)  # eight chunks and one of a byte, once
def test_middling_messages_are_cut_for_several_rails_and_large_ones_into_the_largest_chunks(nbytes: int) -> None:
    flow = tcp.DEVICE_FLOW
    cut = list(pieces(nbytes, flow.chunk_of(nbytes)))
    assert all(past - first <= flow.chunk_bytes and not first % 4096 for first, past in cut)
    assert len(cut) <= max(8, -(-nbytes // flow.chunk_bytes))
    if nbytes >= 4 * flow.least_bytes:
        assert len(cut) >= 4
    assert tcp.HOST_FLOW.chunk_of(nbytes) == tcp.HOST_FLOW.chunk_bytes


def test_a_layout_knows_home_place_and_strangers() -> None:
    layout = IslandLayout(3, ((0, 1, 2), (3, 4)))
    assert (layout.size, layout.home, layout.place, layout.foreign) == (5, 1, 0, (0,))
    assert layout.local(4)
    assert not layout.local(2)
    assert layout.common_parts == 6


@given(st.integers(1, 1 << 33))
def test_devices_take_few_spans_of_whole_slots(nbytes: int) -> None:
    each = span_bytes(nbytes, on_device=True)
    assert SLOT_BYTES <= each <= span_bytes(1 << 40, on_device=False)
    assert each % SLOT_BYTES == 0
    assert each % tcp.DEVICE_FLOW.chunk_bytes == 0  # no rest in a chunk of its own
    assert shm.SUMS.chunk_bytes - 64 * 1024 <= SLOT_BYTES <= shm.SUMS.chunk_bytes
    assert -(-nbytes // each) <= max(2, -(-nbytes // (4 * SLOT_BYTES)))
    assert span_bytes(nbytes, on_device=False) <= max(nbytes, 4 << 20)
