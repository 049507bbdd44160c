"""Which ranks keep copies of which others' shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.checkpoint.copy_targets import targets_of
from hetctl.trainer.recipe import load_recipe

UNEVEN = ["a", "a", "a", "b", "c", "c"]


@pytest.mark.parametrize(
    ("store", "targets"),
    [
        ("replicate:1", [(), (), (), (), (), ()]),
        ("replicate:2", [(3,), (3,), (3,), (4,), (0,), (1,)]),
        ("replicate:3", [(3, 4), (3, 5), (3, 4), (4, 0), (0, 3), (1, 3)]),
        ("gather:b", [(3,), (3,), (3,), (), (3,), (3,)]),
    ],
)
def test_copies_go_to_other_hosts(store: str, targets: list[tuple[int, ...]]) -> None:
    assert targets_of(UNEVEN, store) == targets


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), st.integers(1, 7))
def test_every_shard_lives_on_as_many_hosts_as_asked(hosts: list[str], count: int) -> None:
    for rank, to in enumerate(targets_of(hosts, f"replicate:{count}")):
        assert len({hosts[rank], *(hosts[r] for r in to)}) == len(to) + 1 == min(count, len(set(hosts)))


def test_what_nobody_can_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rank runs on 'd'"):
        targets_of(UNEVEN, "gather:d")
    for wrong in ("replicate:0", "replicate", "gather:", "everywhere"):
        with pytest.raises(ConfigError, match=r"checkpoint\.store must be"):
            load_recipe(None, [("checkpoint.store", wrong)])
