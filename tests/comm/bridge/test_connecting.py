"""Lanes wait for their other ends as long as their messages may take, not longer than the group lives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bridge import bridge, forwarded, staging
from hetctl.comm.bridge.connecting import ConnectWait, accept, offer
from hetctl.comm.contract.cluster import TransportKind
from hetctl.comm.contract.placement import PlacedBridge
from hetctl.comm.operation.work import HetWork, OperationDeadline
from tests.busy import busy
from tests.comm.spawn import on_islands

TIMEOUT = 2.0
both = pytest.mark.parametrize("transport", ["tcp", "shm"])


def bridges(transport: TransportKind) -> tuple[PlacedBridge, ...]:
    return (PlacedBridge(("island0", "island1"), transport),)


def test_a_lock_that_another_lane_keeps_is_waited_for_only_while_there_is_patience() -> None:
    lock, why = threading.Lock(), list[str]()
    connect_wait = ConnectWait(lambda: why[0] if why else None)
    with connect_wait.holding(lock):
        threading.Timer(0.05, why.append, ["timed out"]).start()
        with pytest.raises(RuntimeError, match="timed out"), connect_wait.holding(lock):
            pass
    assert not lock.locked()


def test_what_is_in_the_store_is_taken_when_it_comes() -> None:
    store = dist.HashStore()
    threading.Timer(0.05, store.set, ["key", "value"]).start()
    assert ConnectWait(lambda: None).value_of(store, "key") == b"value"


def test_control_connections_meet_and_end_with_patience() -> None:
    store, there = dist.HashStore(), list[Any]()
    end = threading.Thread(target=lambda: there.append(offer(store, "ring", {"I": "offer"}, ConnectWait(lambda: None))))
    end.start()
    here, said = accept(store, "ring", {"I": "accept"}, ConnectWait(lambda: None))
    end.join(10)
    ((other, heard),) = there
    assert said["I"] == "offer"
    assert heard["I"] == "accept"
    here.tell(3)
    stop = os.eventfd(0)
    other.sleep(stop, 10)
    other.check(stop)  # takes nothing of it
    assert other.heard(1) == 1
    assert other.heard() == 2
    other.check(stop)
    with pytest.raises(RuntimeError, match="timed out"):
        offer(store, "nobody comes", {}, ConnectWait(lambda: None).within(OperationDeadline(0.05)))
    with pytest.raises(RuntimeError, match="timed out"):
        accept(store, "nobody offers", {}, ConnectWait(lambda: None).within(OperationDeadline(0.05)))
    here.close()
    with pytest.raises(RuntimeError, match="the other process is gone"):
        other.check(stop)
    os.eventfd_write(stop, 1)
    with pytest.raises(RuntimeError, match="was closed"):
        other.check(stop)
    other.close()
    os.close(stop)


def test_strangers_get_no_control_connection_and_hold_up_nobody() -> None:
    """A hundred that say nothing, and some that say too much, ask for a lot of memory, or begin and go away."""
    store, there = dist.HashStore(), list[Any]()
    end = threading.Thread(target=lambda: there.append(offer(store, "ring", {"I": "offer"}, ConnectWait(lambda: None))))
    end.start()
    address, port, secret = json.loads(store.get("ring"))
    strangers = [socket.create_connection((address, port)) for _ in range(100)]
    for stranger, said in zip(strangers, (b"\0" * 64, b"\xff" * 4096, bytes.fromhex(secret), b"{}"), strict=False):
        stranger.sendall(said)
    strangers[4].close()
    began = time.monotonic()
    here, said = accept(store, "ring", {"I": "accept"}, ConnectWait(lambda: None))
    assert time.monotonic() - began < 2.0 * busy()
    end.join(10)
    ((other, heard),) = there
    assert (said["I"], heard["I"]) == ("offer", "accept")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port))  # whoever overheard the secret comes too late
    for each in (here, other, *strangers):
        each.close()


def one_never_sends(rank: int) -> float:
    """Rank 0 receives from anybody, which waits for rank 2 as well, whose first message comes after the timeout."""
    group, data = dist.new_group(timeout=timedelta(seconds=TIMEOUT)), torch.full((3,), float(rank))
    if rank == 0:
        assert dist.recv(data, group=group) == 1
    if rank == 1:
        dist.send(data, 0, group=group)
    time.sleep(TIMEOUT + 1)  # longer than the group's operations may take: that is what is tested
    dist.all_reduce(data, group=group)
    if rank == 2:
        dist.send(torch.full((3,), 7.0), 0, group=group)
    if rank == 0:
        dist.recv(data, 2, group=group)
    dist.destroy_process_group(group)
    return float(data[0])


@both
def test_who_rightly_never_sends_breaks_no_group_that_receives_from_anybody(transport: TransportKind) -> None:
    first, *others = on_islands((1, 2), one_never_sends, broken=True, bridges=bridges(transport))
    assert first == 7.0
    assert others == [4.0, 4.0]  # 1 was received from rank 1, and 1 + 1 + 2 is their sum


def nobody_sends(rank: int) -> tuple[str, float]:
    group, began = dist.new_group(timeout=timedelta(seconds=TIMEOUT)), time.monotonic()
    try:
        if rank == 0:
            dist.recv(torch.zeros(3), group=group)
        else:
            time.sleep(TIMEOUT + 2)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@both
def test_a_receive_from_anybody_still_ends_at_its_own_deadline(transport: TransportKind) -> None:
    (text, took), _ = on_islands((1, 1), nobody_sends, broken=True, bridges=bridges(transport))
    assert f"recv from any rank failed: Timed out after {TIMEOUT:g} s" in text
    assert TIMEOUT <= took < TIMEOUT + 5 * busy()


def untaken(rank: int, how: str) -> tuple[float, str, list[str]]:
    """How long the end of a group with a message that nobody takes lasts, what the message ends with, what is left."""
    bridge.UNTAKEN_SECONDS = 1.0
    group = dist.new_group(timeout=timedelta(seconds=40))
    if rank == 1:
        dist.barrier()
        return 0.0, "", []
    work = dist.isend(torch.ones(1000), 1, group=group, tag=5)
    began = time.monotonic()
    if how == "aborted":
        group.abort()
    dist.destroy_process_group(group)
    took, left = time.monotonic() - began, [t.name for t in threading.enumerate() if t.name.endswith("tag 5")]
    dist.barrier()
    return took, str(work.exception()), left


@both
@pytest.mark.parametrize("how", ["aborted", "destroyed"])
def test_a_message_that_nobody_takes_holds_no_group(how: str, transport: TransportKind) -> None:
    (took, text, left), _ = on_islands((1, 1), untaken, how, broken=True, bridges=bridges(transport))
    assert took < 5 * busy()
    assert "send to rank 1 on host1 ended" in text
    assert how in text
    assert not left


class Passed:
    """The event of a copy that is over: a message from a device ends there, not when it is taken."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


def copied_out(rank: int, taken: int, idle: float) -> tuple[float, list[str]]:
    """How long the end of a group lasts whose two messages have ended, the second `taken` or not; what is left."""
    bridge.UNTAKEN_SECONDS, forwarded.IDLE_SECONDS = 1.0, 60.0
    out, group = staging.CopyEngine.out, dist.new_group(timeout=timedelta(seconds=40))
    data = torch.ones(1000)
    if rank == 1:
        for number in range(1 + taken):
            time.sleep(0.3 + idle * number)  # the group is being destroyed by then
            dist.recv(got := torch.zeros(1000), 0, group=group, tag=5)
            assert torch.equal(got, data)
        dist.barrier()
        return 0.0, []
    staging.CopyEngine.out = lambda *args: out(*args) or Passed()  # type: ignore[assignment, method-assign]
    HetWork.synchronize = lambda self: None  # type: ignore[method-assign]
    for number in range(2):  # the first one waits for the connection
        dist.send(data, 1, group=group, tag=5)
        time.sleep(0 if number else idle)
    began = time.monotonic()
    dist.destroy_process_group(group)
    took, left = time.monotonic() - began, [t.name for t in threading.enumerate() if t.name.endswith("tag 5")]
    staging.CopyEngine.out = out  # type: ignore[method-assign]
    dist.barrier()
    return took, left


@both
@pytest.mark.parametrize(("taken", "idle"), [(0, 0), (1, 0), (1, 1.5)], ids=["untaken", "taken", "taken after a rest"])
def test_what_was_copied_out_arrives_and_holds_its_group_no_longer_than_what_is_sent(
    taken: int, idle: float, transport: TransportKind
) -> None:
    (took, left), _ = on_islands((1, 1), copied_out, taken, idle, broken=True, bridges=bridges(transport))
    assert took < 4 * busy()  # an idle lane's thread would wait a minute for more
    assert not left


def taken_slowly(rank: int) -> bool:
    bridge.UNTAKEN_SECONDS = 2.0
    group, count = dist.new_group(timeout=timedelta(seconds=40)), 6
    data = [torch.full((1000,), float(number)) for number in range(count)]
    if rank == 0:
        works = [dist.isend(one, 1, group=group) for one in data]
        dist.destroy_process_group(group)
        return all(work.is_success() for work in works)
    for one in data:
        time.sleep(0.5)  # all of them take longer than what nobody takes may
        got = torch.zeros(1000)
        dist.recv(got, 0, group=group)
        assert torch.equal(got, one)
    dist.destroy_process_group(group)
    return True


@both
def test_messages_that_are_taken_slowly_are_still_sent(transport: TransportKind) -> None:
    assert on_islands((1, 1), taken_slowly, bridges=bridges(transport)) == [True, True]


EXITS = """
import threading
import torch.distributed as dist
from pathlib import Path
from hetctl.comm.bridge import shm
from hetctl.comm.bridge.connecting import ConnectWait
store, waits = dist.HashStore(), threading.Event()
offer = lambda: shm._offer(store, "ring", ConnectWait(waits.set), nbytes=1)
threading.Thread(target=offer, daemon=True).start()
waits.wait()
print(Path(store.get("ring").decode()).exists())
"""


def test_a_process_that_exits_while_a_lane_waits_leaves_no_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = [sys.executable, "-W", "ignore", "-c", EXITS]
    assert subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.strip() == "True"
    assert not list(tmp_path.glob("hetctl-shm-*"))
