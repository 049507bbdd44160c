"""However many groups a program makes, each process has few connections to the job's store."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.operation import store_connections
from hetctl.comm.operation.store_connections import GroupStore
from hetctl.comm.operation.work import PrefixStore
from tests.comm.spawn import on_islands


def made(rank: int) -> tuple[int, int]:
    """How many groups there are, and how many stores anybody has connections to."""
    groups = [dist.new_group(range(dist.get_world_size())) for _ in range(5)]
    for group in groups:
        dist.all_reduce(total := torch.ones(3), group=group)
        assert total[0] == dist.get_world_size()
    taken = [len(each._idle) for each in store_connections._known.values()]
    for group in groups:
        dist.destroy_process_group(group)
    return sum(taken), len(taken)


def test_groups_share_connections_to_the_store() -> None:
    for waiting, stores in on_islands((1, 2), made, seconds=30):
        assert stores <= 2  # the world's own, and the one that all its subgroups have
        assert waiting <= 2 * 2  # as many at once as there are lanes to peers


def test_keys_of_groups_are_apart_and_a_failed_connection_is_not_used_again() -> None:
    base = dist.HashStore()
    one, other = (GroupStore(PrefixStore("cpu/", PrefixStore(f"{n}/", base)), n) for n in ("1", "2"))
    one.talk.set("key", "of one")
    with one.waiting() as store:
        assert store.get("key") == b"of one"
    assert not other.talk.check(["key"])
    with pytest.raises(RuntimeError, match="broke"), one.waiting():
        raise RuntimeError("it broke")
    assert one._connections is other._connections
    assert not one._connections._idle
