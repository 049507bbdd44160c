"""Which ports go together: the same at both ends, every port of a shared network, none of another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.bridge.rdma_ports import pairs


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (["a", "b"], ["a", "b"], [(0, 0), (1, 1)]),
        (["a", "b"], ["b", "a"], [(0, 1), (1, 0)]),  # by network, not by order
        (["a", "b"], ["b"], [(1, 0)]),
        (["a", "a"], ["a"], [(0, 0), (1, 0)]),
        (["a"], ["b"], []),
        (["", ""], ["a", "b"], [(0, 0), (1, 1)]),
    ],
)
def test_ports_of_one_network_go_together(mine: list[str], theirs: list[str], expected: list[tuple[int, int]]) -> None:
    assert pairs(mine, theirs) == expected


NETWORKS = st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=5)


@given(NETWORKS, NETWORKS)
def test_both_ends_say_the_same(mine: list[str], theirs: list[str]) -> None:
    found = pairs(mine, theirs)
    assert [(j, i) for i, j in pairs(theirs, mine)] == found
    if "" not in mine + theirs:
        assert all(mine[i] == theirs[j] for i, j in found)
        shared = set(mine) & set(theirs)
        assert {i for i, _ in found} == {i for i, name in enumerate(mine) if name in shared}
