"""A rail is lost in the middle of operations: the results are exact, both ends name it, the others carry its chunks."""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.bridge import failover, tcp, window
from hetctl.comm.bridge.failover import Loss, remaining, route
from hetctl.comm.contract import variables
from hetctl.comm.operation.recorder import RECORDER
from tests.comm.spawn import on_islands

COUNT = 20_000_000  # 80 MB of fp32: twenty chunks


@given(st.integers(2, 8), st.data())
def test_lost_rails_carry_nothing_and_the_others_share_it(count: int, data: st.DataObject) -> None:
    lost = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count - 1))]
    losses = [Loss(rail, (1, 4 * number)) for number, rail in enumerate(lost)]
    before = [(0, chunk) for chunk in range(4 * count)]
    # message 0 begins with rail 0
    assert [route(p, count, losses) for p in before] == [(p[1] % count, 0) for p in before]
    after = [(2, chunk) for chunk in range(4 * count * count)]
    taken = [route(p, count, losses) for p in after]
    assert {rail for rail, _ in taken} == set(remaining(count, losses))
    assert all(moved or rail == (p[0] + p[1]) % count for (rail, moved), p in zip(taken, after, strict=True))


def test_one_lost_rail_of_four_is_shared_evenly() -> None:
    taken = [route((0, chunk), 4, [Loss(2, (0, 0))])[0] for chunk in range(48)]
    assert [taken.count(rail) for rail in range(4)] == [16, 16, 0, 16]


class Swallowed:
    """What the network took and never brings: the sender believes that it has gone."""

    def wait(self, timeout: timedelta) -> bool:
        return True


class Held:
    """A chunk that was under way when its rail was cut: whoever waits for it is not woken before the deadline."""

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Timed out")


def hold_rail(lost: int) -> None:
    """From now on this process's chunks on rail `lost` neither come nor go, nor end when it is cut."""
    true_post = tcp.TcpLaneEnd.post

    def post(self: Any, slot: torch.Tensor, length: int, position: tuple[int, int]) -> Any:
        return Held() if self.route(position) == lost else true_post(self, slot, length, position)

    tcp.TcpLaneEnd.post = post  # type: ignore[method-assign]


def swallow_rail(lost: int, *, after: int) -> list[int]:
    """From now on this process's sends on rail `lost` go nowhere, after some more; the list counts them."""
    true_post, sent = tcp.TcpLaneEnd.post, [0]

    def post(self: Any, slot: torch.Tensor, length: int, position: tuple[int, int]) -> Any:
        sent[0] += 1
        if self._key.sending and sent[0] > after and self.route(position) == lost:
            return Swallowed()
        return true_post(self, slot, length, position)

    tcp.TcpLaneEnd.post = post  # type: ignore[method-assign]
    return sent


def loses_a_rail(rank: int, kind: str) -> tuple[list[str], int]:
    os.environ[variables.RAILS] = "3"
    failover.STALL_SECONDS = window.STALL_SECONDS = 1.0
    true_devices = tcp._devices  # as if each rail had a NIC of its own: messages are cut for three
    tcp._devices = lambda: [(f"nic{i}", d) for i, (_, d) in enumerate(true_devices())]  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        sums = torch.full((COUNT,), rank + 1.0)
        dist.all_reduce(sums)
        assert bool((sums == 3).all())
        if kind == "swallowed" and rank == 0:
            swallow_rail(1, after=9)
        if kind == "held":
            hold_rail(1)
        for turn in range(3):
            if kind == "broken" and rank == 0 and turn == 1:
                threading.Timer(0.05, break_rail, [1]).start()
            sums = torch.arange(float(COUNT)) * (rank + 1)
            dist.all_reduce(sums)
            assert torch.equal(sums, torch.arange(float(COUNT)) * 3), turn
            data = torch.arange(COUNT) + turn
            if rank == 0:
                dist.send(data, 1)
            else:
                dist.recv(got := torch.zeros_like(data), 0)
                assert torch.equal(got, data)
    recorded = [e["operation"] for e in RECORDER.entries() if "is lost" in e["operation"]]
    return [str(w.message) for w in heard if "is lost" in str(w.message)], len(recorded)


def break_rail(index: int) -> None:
    """End one rail's connection from this process to the other, as a reset on the way would."""
    group: Any = dist.group.WORLD
    for link in group._transports_of._made["tcp", None]._links.values():
        tcp.break_pair(link._rails[index].group, 1 if link._sending else 0)


def run(kind: str) -> None:
    outcomes = on_islands((1, 1), loses_a_rail, kind, seconds=90)
    for rank, (heard, recorded) in enumerate(outcomes):
        assert any(f"rail 1 (nic1) {w} rank {1 - rank}" in s for s in heard for w in ("to", "from")), heard
        assert recorded >= 1


def test_a_rail_that_swallows_chunks_is_named_and_the_result_is_exact() -> None:
    run("swallowed")


def test_a_rail_cut_under_a_chunk_holds_nobody_and_the_result_is_exact() -> None:
    run("held")


def test_a_rail_that_breaks_is_named_and_the_result_is_exact() -> None:
    run("broken")


class Late:
    """What was posted, and is waited for a while longer."""

    def __init__(self, posted: Any) -> None:
        self.posted = posted

    def wait(self, timeout: timedelta) -> bool | None:
        time.sleep(0.25)
        return self.posted.wait(timeout)  # type: ignore[no-any-return]


def slow_rails(rank: int) -> list[str]:
    os.environ[variables.RAILS] = "2"
    failover.STALL_SECONDS = window.STALL_SECONDS = 1.0
    true_post = tcp.TcpLaneEnd.post

    def post(self: Any, slot: torch.Tensor, length: int, position: tuple[int, int]) -> Any:
        posted = true_post(self, slot, length, position)
        return posted if self._key.sending else Late(posted)

    tcp.TcpLaneEnd.post = post  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        data = torch.arange(16 * tcp.HOST_FLOW.chunk_bytes // 4, dtype=torch.float32)
        if rank == 0:
            dist.send(data, 1)
        else:
            dist.recv(got := torch.zeros_like(data), 0)
            assert torch.equal(got, data)
        dist.barrier()
    return [str(w.message) for w in heard if "is lost" in str(w.message)]


def test_slow_rails_that_still_move_are_not_lost() -> None:
    """A chunk behind fifteen others waits for four seconds here, but none takes as long as what counts as lost."""
    assert on_islands((1, 1), slow_rails, seconds=60) == [[], []]
