"""Shared memory: however many tags a program uses, few rings are held, and a ring that was given up is made anew."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import torch
import torch.distributed as dist

from hetctl.comm.bridge import shm
from hetctl.comm.bridge.lane_end import Flow
from hetctl.comm.contract.placement import PlacedBridge
from hetctl.comm.contract.units import KiB
from tests.comm.spawn import on_islands

BRIDGES = (PlacedBridge(("island0", "island1"), "shm"),)
RINGS = 3


def few_rings() -> None:
    shm.MOST_RINGS, shm.MESSAGES = RINGS, Flow(64 * KiB, window=2)  # type: ignore[misc]
    shm.UNUSED_SECONDS = 0.0  # type: ignore[misc]


def held() -> tuple[int, int]:
    """How many rings are mapped in this process, and how many descriptors it has."""
    return Path("/proc/self/maps").read_text().count("hetctl-ring"), len(os.listdir("/proc/self/fd"))


def a_tag_for_each_step(rank: int) -> list[tuple[int, int]]:
    few_rings()
    found = []
    for step in range(60):
        data = torch.full((3,), float(step))
        if rank == 0:
            dist.send(data, 1, tag=step)
        else:
            dist.recv(got := torch.zeros(3), 0, tag=step)
            assert torch.equal(got, data)
        if step in (RINGS + 5, 59):
            found.append(held())
    return found


def test_a_tag_for_each_step_holds_few_rings() -> None:
    for early, late in on_islands((1, 1), a_tag_for_each_step, bridges=BRIDGES):
        assert late[0] <= RINGS + 3  # the other end hears a moment later
        assert late[1] <= early[1] + 15


def tags_in_turn(rank: int) -> int:
    """More tags in turn than rings that idle lanes keep, all of them used lately: nobody rests, up to a limit."""
    few_rings()
    shm.UNUSED_SECONDS, shm.MOST_OF_ALL = 60.0, 2 * RINGS  # type: ignore[misc]
    for step in range(6 * RINGS):
        data = torch.full((3,), float(step))
        if rank == 0:
            dist.send(data, 1, tag=step % (2 * RINGS - 1))
        else:
            dist.recv(got := torch.zeros(3), 0, tag=step % (2 * RINGS - 1))
            assert torch.equal(got, data)
    return held()[0]


def test_tags_that_are_used_in_turn_keep_their_rings() -> None:
    for rings in on_islands((1, 1), tags_in_turn, bridges=BRIDGES):
        assert 2 * RINGS - 1 <= rings <= 2 * RINGS


def awaits_on_a_ring_given_up(rank: int) -> float:
    """Rank 1's second receive with tag 0 waits on its ring while rank 0, using other tags, gives that ring up."""
    few_rings()
    first, second = torch.zeros(100_000), torch.zeros(100_000)
    if rank == 0:
        dist.send(first + 1, 1, tag=0)
    else:
        dist.recv(first, 0, tag=0)
        waiting = dist.irecv(second, 0, tag=0)
    for tag in range(1, 20):
        dist.send(torch.ones(3), 1, tag=tag) if rank == 0 else dist.recv(torch.ones(3), 0, tag=tag)
    if rank == 0:
        (lane,) = [lane for key, lane in _lanes().items() if key.sending and key.tag == 0 and key.kind == 0]
        assert lane._window is None  # or nothing is tested here
        dist.send(second + 2, 1, tag=0)
        return 2.0
    waiting.wait()
    assert bool((first == 1).all())
    return float(second.mean())


def _lanes() -> dict[shm.LaneKey, shm.ForwardedLane]:
    group = dist.group.WORLD
    lanes: dict[shm.LaneKey, shm.ForwardedLane] = group._transports_of._made["shm", None]._lanes  # type: ignore[union-attr]
    return lanes


def test_a_receive_that_waits_goes_on_with_the_next_ring() -> None:
    assert on_islands((1, 1), awaits_on_a_ring_given_up, bridges=BRIDGES) == [2.0, 2.0]


def a_closed_end_counts(rank: int) -> bool:
    """What a thread does to a ring that another one closed, whose numbers are somebody else's descriptors by then."""
    data = torch.ones(4)
    (dist.send if rank == 0 else dist.recv)(data, 1 - rank)
    dist.barrier()
    transport = dist.group.WORLD._transports_of._made["shm", None]  # type: ignore[union-attr]
    [end] = [end for end in transport._ends if end.key.kind == shm.P2P]
    end.close()
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(16)]
    assert {end._handles.filled, end._handles.freed} <= set(others)
    end._free()
    end.post(torch.empty(0), 1, None)
    mine = [end._handles.freed, end._handles.filled]
    found = [fd for fd in others if shm.select.select([fd], [], [], 0)[0]]
    for fd in mine:
        os.eventfd_write(fd, 1)
    return not found and not end._taken()


def test_a_closed_ring_counts_on_nobody_elses_counter() -> None:
    assert on_islands((1, 1), a_closed_end_counts, bridges=BRIDGES) == [True, True]


def in_any_order(rank: int, seed: int) -> int:
    """Both ways at once, some tags again and again, received in another order than sent, of several chunks and none."""
    few_rings()
    order = random.Random(seed)
    for turn in range(12):
        tags = [order.randrange(12) for _ in range(10)]
        sizes = [order.choice([0, 5, 200_000]) for _ in tags]
        received = sorted(range(10), key=lambda i: (tags[i] * 7 % 12, i))  # those of one tag keep their order
        sent = [dist.isend(torch.full((sizes[i],), turn * 10.0 + i), 1 - rank, tag=tags[i]) for i in range(10)]
        got = {i: torch.zeros(sizes[i]) for i in received}
        for work in [dist.irecv(got[i], 1 - rank, tag=tags[i]) for i in received] + sent:
            work.wait()
        assert all(bool((data == turn * 10.0 + i).all()) for i, data in got.items())
    return held()[0]


def test_messages_of_many_tags_arrive_in_any_order() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # shown when it fails
    for rings in on_islands((1, 1), in_any_order, seed, bridges=BRIDGES):
        assert rings < 24 + 2  # there and back, and a barrier's


def all_at_once(rank: int) -> int:
    shm.MESSAGES = Flow(64 * KiB, window=2)  # type: ignore[misc]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    data = [torch.full((3,), float(tag)) if rank == 0 else torch.zeros(3) for tag in range(80)]
    works = [(dist.isend if rank == 0 else dist.irecv)(one, 1 - rank, tag=tag) for tag, one in enumerate(data)]
    for work in works:
        work.wait()
    assert all(bool((one == tag).all()) for tag, one in enumerate(data))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_many_tags_at_once_may_take_the_descriptors_that_the_system_allows() -> None:
    for soft in on_islands((1, 1), all_at_once, bridges=BRIDGES):
        assert soft > 256
