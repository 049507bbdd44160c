"""Lanes through slots: what comes is what was sent, in order, and never more slots are out than the window has."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.bridge import forwarded
from hetctl.comm.bridge.bridge import LaneKey, Message
from hetctl.comm.bridge.forwarded import RecvLane, SendLane
from hetctl.comm.bridge.lane_end import PAGE_BYTES, Flow, LaneEnd
from hetctl.comm.bridge.staging import TRAILER_BYTES, engine_for
from hetctl.comm.operation.work import HetWork, OperationDeadline

CPU = torch.device("cpu")
FLOW = Flow(64, window=3)


class Wire:
    """Between two ends in one process: filled slots one way, the word that one is free the other."""

    def __init__(self) -> None:
        self.filled: queue.Queue[bytes] = queue.Queue()
        self.freed: queue.Queue[None] = queue.Queue()
        self.spoil: Callable[[bytearray], object] = lambda data: None


class End(LaneEnd):
    """One end, which knows of each of its slots whether it is out."""

    def __init__(self, wire: Wire, *, sending: bool) -> None:
        self._wire, self._sending = wire, sending
        self._free = [torch.zeros(FLOW.slot_bytes, dtype=torch.uint8) for _ in range(FLOW.window)]
        self.out: dict[int, torch.Tensor] = {}
        self.most = 0

    def rail(self, position: tuple[int, int]) -> str:
        return "the wire"

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        slot = self._free.pop(0)  # raises where a lane takes more than its window
        self.out[slot.data_ptr()] = slot
        self.most = max(self.most, len(self.out))
        return slot

    def post(self, slot: torch.Tensor, length: int, position: tuple[int, int]) -> Any:
        assert slot.data_ptr() in self.out
        if self._sending:
            data = bytearray(slot[: length + TRAILER_BYTES].numpy().tobytes())
            self._wire.spoil(data)
            self._wire.filled.put(bytes(data))
        return SimpleNamespace(wait=lambda timeout: self._wait(slot, timeout))

    def _wait(self, slot: torch.Tensor, timeout: timedelta) -> bool:
        if self._sending:
            self._wire.freed.get(timeout=timeout.total_seconds())
        else:
            came = self._wire.filled.get(timeout=timeout.total_seconds())
            slot[: len(came)] = torch.frombuffer(bytearray(came), dtype=torch.uint8)
        return True

    def give(self, slot: torch.Tensor, event: Any) -> None:
        self._free.append(self.out.pop(slot.data_ptr()))  # raises for one that is not out
        if not self._sending:
            self._wire.freed.put(None)

    def idle(self) -> None:
        return None


class Pair:
    """A sending and a receiving lane over a wire."""

    def __init__(self, *, verify: bool = False) -> None:
        self.wire, self.said, self.failed = Wire(), list[str](), threading.Event()
        self.ends = {sending: End(self.wire, sending=sending) for sending in (True, False)}
        bridge: Any = SimpleNamespace(
            error=None,
            verify=verify,
            who=lambda rank: f"rank {rank}",
            on_error=self._fail,
            end=lambda message, ready=None: message.work.finish(ready=ready),
        )
        self.lanes = {
            sending: made(
                bridge, LaneKey(sending, 1, 0, 0, CPU), self._connect(sending), flow=FLOW, engine=engine_for(CPU)
            )
            for sending, made in ((True, SendLane), (False, RecvLane))
        }

    def _connect(self, sending: bool) -> Any:
        return lambda connect_wait: self.ends[sending]

    def _fail(self, sentence: str) -> None:
        self.said.append(sentence)
        self.failed.set()

    def move(self, data: torch.Tensor, target: torch.Tensor, **more: Any) -> list[HetWork]:
        """Hand a message to both lanes; the handles."""
        works = []
        for sending, tensor in ((True, data), (False, target)):
            deadline = OperationDeadline(60)
            works.append(HetWork("send" if sending else "recv", [tensor], deadline=deadline))
            self.lanes[sending].put(Message(tensor, works[-1], deadline, **({} if sending else more)))
        return works

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close(seconds=10)


def test_messages_of_many_chunks_come_in_order_through_a_window_of_slots() -> None:
    pair = Pair()
    sent = [torch.arange(count, dtype=torch.int32) + count for count in (1, 16, 17, 200, 3)]
    got = [torch.zeros_like(data) for data in sent]
    works = [work for data, target in zip(sent, got, strict=True) for work in pair.move(data, target)]
    assert all(work.wait(timedelta(seconds=60)) for work in works)
    pair.close()
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
    for end in pair.ends.values():
        assert (end.most, end.out) == (FLOW.window, {})  # all were used, and all are back
    assert not pair.lanes[True].busy


def test_what_comes_is_combined_with_what_is_there() -> None:
    pair, target = Pair(), torch.ones(100)
    for work in pair.move(torch.full((100,), 2.0), target, combine=torch.Tensor.add_):
        work.wait(timedelta(seconds=60))
    pair.close()
    assert target.tolist() == [3.0] * 100


def test_a_chunk_that_changes_on_its_way_ends_the_lane_with_a_sentence() -> None:
    pair = Pair(verify=True)
    pair.wire.spoil = lambda data: data.__setitem__(3, data[3] ^ 1)
    pair.move(torch.zeros(40), torch.zeros(40))
    assert pair.failed.wait(60)
    assert "recv failed receiving from rank 1: " in pair.said[0]
    assert "chunk 0 of message 0 arrived with other bytes" in pair.said[0]


def test_an_idle_lanes_thread_ends_and_the_next_message_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarded, "IDLE_SECONDS", 0.02)
    pair = Pair()
    for number in range(2):
        target = torch.zeros(30)
        works = pair.move(torch.full((30,), number + 1.0), target)
        threads = [lane._thread for lane in pair.lanes.values()]
        assert all(work.wait(timedelta(seconds=60)) for work in works)
        for thread in threads:
            assert thread is None or not thread.join(60)
        assert target.tolist() == [number + 1.0] * 30
    pair.close()


@given(st.integers(0, 1 << 34), st.sampled_from([0, 2 << 20]))
def test_chunks_fit_their_slots_and_fill_whole_pages(nbytes: int, least: int) -> None:
    flow = Flow((8 << 20) - PAGE_BYTES, window=16, least_bytes=least)
    chunk = flow.chunk_of(nbytes)
    assert 0 < chunk <= flow.chunk_bytes
    assert chunk % PAGE_BYTES == 0
    assert least <= chunk
    assert flow.ring_bytes == 16 * flow.slot_bytes > 16 * (chunk + TRAILER_BYTES)
