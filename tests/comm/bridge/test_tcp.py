"""Rails: which of two ends go together; their devices, shared by a process's groups and gone with the last of them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bridge import tcp
from hetctl.comm.bridge.tcp import MAIN, paired
from hetctl.comm.contract import variables
from tests.comm.spawn import on_islands

RAILS = 3


def meets(group: dist.ProcessGroup, rank: int) -> None:
    data = torch.ones(70_000)
    dist.all_reduce(data, group=group)
    dist.send(data, 1, group=group) if rank == 0 else dist.recv(data, 0, group=group)
    assert bool((data == 2).all())


def groups_come_and_go(rank: int) -> list[tuple[int, int]]:
    """(devices known, sockets open) with one group, with two, with the second alone, without any, and with a third."""
    os.environ[variables.RAILS] = str(RAILS)
    found = []

    def note() -> None:
        found.append((sum(len(devices) for devices in tcp._SHARED.values()), sockets()))

    first = dist.new_group()
    meets(first, rank)
    note()
    second = dist.new_group()
    meets(second, rank)
    note()
    dist.destroy_process_group(first)
    meets(second, rank)
    note()
    dist.destroy_process_group(second)
    note()
    third = dist.new_group()
    meets(third, rank)
    note()
    dist.destroy_process_group(third)
    return found


def sockets() -> int:
    held = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum("socket:" in path for path in held)


def test_devices_are_shared_and_end_with_the_last_group() -> None:
    for found in on_islands((1, 1), groups_come_and_go):
        assert [devices for devices, _ in found] == [RAILS, RAILS, RAILS, 0, RAILS]
        one, two, second, none, third = (count for _, count in found)
        assert none <= one - 3 * RAILS  # three listened, and three to and three from the other rank
        assert second <= one
        assert third <= one
        assert two <= one + 3 * RAILS  # natives' too; no more that listen for rails


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


def test_a_nic_that_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("HETCTL_NICS", "gone0@a,lo@b")
    with pytest.warns(UserWarning, match="no rail over gone0"):
        assert tcp._interfaces() == ["lo"]
    monkeypatch.setenv("HETCTL_NICS", "gone0@a")
    assert tcp._interfaces() == ["lo"]  # the data address's
