"""A rank that dies or falls silent ends everybody's operations in time, with an error that names it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.contract import variables
from hetctl.comm.group.error_flag import ErrorFlag
from hetctl.comm.group.native import NativeCommunicator, StartedNative, break_native, settle
from hetctl.comm.group.runner import PendingDeviceWork, PendingItem
from hetctl.comm.operation.work import NativeFailed, OperationDeadline
from tests.bench import kill
from tests.busy import busy
from tests.comm.spawn import on_islands
from tests.rigs import netns

TIMEOUT = 3.0


def loses(rank: int, victim: int, number: int, folder: str) -> tuple[str, float]:
    os.environ[variables.FLIGHT] = folder
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    data = torch.ones(200_000)
    dist.all_reduce(data, group=group)
    pending = [dist.all_reduce(data, group=group, async_op=True) for _ in range(3)]
    if rank == victim:
        pending[0].wait()
        os.kill(os.getpid(), number)
    began = time.monotonic()
    try:
        for _ in range(2000):
            dist.all_reduce(data, group=group)
        return "no error", 0.0
    except RuntimeError as error:
        took, text = time.monotonic() - began, str(error)
    for work in pending:
        work.exception()
    with pytest.raises(RuntimeError):
        dist.all_reduce(data, group=group)  # a broken group stays broken, and says so at once
    dist.destroy_process_group()
    left = [t.name for t in threading.enumerate() if t.name.startswith("het")]
    assert not left, left
    dist.init_process_group("het", rank=0, world_size=1, store=dist.HashStore())  # for the harness to destroy
    return text, took


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [1, 3])
def test_everybody_learns_who_is_gone(number: int, victim: int, tmp_path: Path) -> None:
    outcomes = on_islands((2, 2), loses, victim, int(number), str(tmp_path), lost=(victim,))
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        text, took = outcome
        assert f"rank {victim} on host{victim}" in text, text
        assert "all_reduce" in text
        assert took < TIMEOUT + 5 * busy()
        dump = json.loads((tmp_path / f"flight-rank-{rank}.json").read_text())
        assert any(entry["state"] == "failed" for entry in dump["operations"])


@pytest.mark.slow
def test_a_few_random_moments() -> None:
    seed, namespaces = int(time.time()), not netns.unavailable()
    tries = [("tcp", [*kill.SIGNALS]), ("shm", [*kill.SIGNALS]), ("tcp", ["partitioned"])]
    for number, (bridge, ways) in enumerate(tries if namespaces else tries[:2]):
        job = kill.Job(2, bridge, gpus=False, namespaces=namespaces and bridge == "tcp")
        moment = kill.moments(1, seed + number, ways, job)[0]
        print(f"seed {seed}: {bridge}, {moment}")  # shown when it fails; `python -m tests.bench.kill` takes many more
        faults, _ = kill.try_moment(moment, job)
        assert not faults


def waits_for_nothing(rank: int) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    began = time.monotonic()
    try:
        if rank == 0:
            dist.recv(torch.ones(4), 1, group=group)
        else:
            time.sleep(TIMEOUT + 3)  # alive, but never sends
            dist.all_reduce(torch.ones(1), group=group)
        return "no error", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - began


def test_a_message_that_never_comes_ends_at_its_deadline_on_both_sides() -> None:
    first, second = on_islands((1, 1), waits_for_nothing, lost=(), broken=True)
    assert "recv from rank 1 on host1" in first[0]
    assert TIMEOUT <= first[1] < TIMEOUT + 5 * busy()
    assert "recv from rank 1" in second[0]  # the group is broken for both, for the same reason


class _EndsEarly:
    """A wait of gloo's: it counts whole milliseconds and rounds down."""

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(max(timeout.total_seconds() - 0.001, 0))
        raise RuntimeError("[somewhere.cc:1] Operation timed out!")


def test_a_native_wait_that_ends_within_its_last_millisecond_timed_out() -> None:
    with pytest.raises(NativeFailed, match=r"barrier 1 failed inside its island: Timed out after 0\.05 s"):
        settle(StartedNative(_EndsEarly(), on_host=True), OperationDeadline(0.05), what="barrier 1")


def test_ranks_that_ring_with_one_sentence_do_not_blame_each_other() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard: dict[int, str] = {}
    alarms = [
        ErrorFlag(
            store, rank=r, names=[f"rank {i}" for i in range(4)], on_verdict=lambda e, r=r: heard.update({r: str(e)})
        )
        for r in (0, 2, 3)
    ]
    for error_flag in alarms:
        error_flag.report("all_reduce 4 failed inside its island: Timed out after 3 s")
    verdicts = {str(error_flag.report_and_wait("")) for error_flag in alarms}
    for error_flag in alarms:
        error_flag.close()
    assert verdicts == {"all_reduce 4 failed inside its island: Timed out after 3 s; no answer from rank 1"}
    assert set(heard) == {0, 2, 3}


class _Event:
    """An event of a device that is reached when somebody says so."""

    def __init__(self) -> None:
        self.reached, self.asked = False, 0

    def query(self) -> bool:
        self.asked += 1
        return self.reached


HERE = torch.device("cpu")


def test_what_a_device_owes_for_too_long_rings() -> None:
    """Nobody waits for it: the host went on when its kernels were queued."""
    pending_device_work, event, heard = PendingDeviceWork(), _Event(), list[str]()
    pending_device_work.add(PendingItem("all_reduce 3", OperationDeadline(0.1), event, HERE, extents=[(0, 8)]))
    pending_device_work.add(PendingItem("all_reduce 4", OperationDeadline(60), event, HERE))
    assert pending_device_work.overdue() is None
    assert pending_device_work.on([(4, 6)]) == [event]  # later ones on its memory are ordered behind it
    assert pending_device_work.on([(8, 9)]) == []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    error_flag = ErrorFlag(
        store,
        rank=0,
        names=["rank 0", "rank 1 on b"],
        on_verdict=lambda e: heard.append(str(e)),
        overdue=pending_device_work.overdue,
    )
    error_flag.watch()
    end = time.monotonic() + 20
    while not heard and time.monotonic() < end:
        time.sleep(0.05)
    error_flag.close()
    assert heard == ["all_reduce 3 has not ended on its device: Timed out after 0.1 s; no answer from rank 1 on b"]


def test_a_device_is_asked_after_the_deadline_and_once() -> None:
    pending_device_work, early, late = PendingDeviceWork(), _Event(), _Event()
    early.reached = late.reached = True
    pending_device_work.add(PendingItem("send to rank 1", OperationDeadline(60), early, HERE))
    pending_device_work.add(PendingItem("send to rank 2", OperationDeadline(0.001), late, HERE))
    time.sleep(0.01)
    before = early.asked
    assert [pending_device_work.overdue(), pending_device_work.overdue()] == [None, None]
    assert (early.asked - before, late.asked) == (0, 1)


@pytest.mark.parametrize(
    ("says", "rings"),
    [
        ("an illegal memory access", "broadcast 1 failed on its device: an illegal memory access"),
        ("operation not permitted when stream is capturing", None),  # asked again once the graph is made
    ],
)
def test_a_device_that_fails_rings_with_its_reason(says: str, rings: str | None) -> None:
    class Failing(_Event):
        def query(self) -> bool:
            raise RuntimeError(says)

    pending_device_work = PendingDeviceWork()
    pending_device_work.add(PendingItem("broadcast 1", OperationDeadline(0.001), Failing(), HERE))
    time.sleep(0.01)
    assert pending_device_work.overdue() == rings


class _Communicator:
    """One that can be ended only while all others of its device are being ended too."""

    def __init__(self, together: threading.Barrier) -> None:
        self._together, self.ended = together, False

    def abort(self) -> None:
        self._together.wait(10)
        self.ended = True


def test_the_communicators_of_an_island_are_ended_at_once() -> None:
    together = threading.Barrier(4)
    groups = [_Communicator(together) for _ in range(4)]
    break_native(NativeCommunicator(groups[0], size=2, second=groups[1], upward=groups[2], downward=groups[3]))
    assert all(group.ended for group in groups)
