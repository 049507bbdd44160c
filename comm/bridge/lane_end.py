"""One end of a lane as its transport makes it: how large its slots are, how they travel, who has one when.

A slot has one owner at a time. Its lane end lends it out (`take`) to the lane's thread, which fills it when it sends.
Posted, it is the window's (`window.py`), until it has gone or come. One that came is the thread's again while the
copy engine reads it; one that went stays with the window for as long as a lost rail may owe it to the other end. Then
the window gives it back to the lane end (`give`). What a lost rail may still touch is never given back.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch

from hetctl.comm.bridge.bridge import LaneKey
from hetctl.comm.bridge.failover import Loss, Movable, Position
from hetctl.comm.contract.units import KiB
from hetctl.comm.operation.device import passed

PAGE_BYTES = 4 * KiB
TRAILER_ROOM = PAGE_BYTES  # in a ring's slots
LAG = 2  # received slots that may wait for the device before the receiver waits for it


@dataclass(frozen=True)
class Flow:
    """The sizes of a transport, the same at both ends: bytes per chunk, and chunks in flight per lane."""

    chunk_bytes: int
    window: int  # together with the chunk it bounds a lane's memory
    copies_ahead: int = 2  # not awaited while the window is full: one at a time would idle the engine that copies
    least_bytes: int = 0  # of the chunks that a message of one or a few is cut into, so that several rails carry it

    def chunk_of(self, nbytes: int) -> int:
        """Bytes of a message's chunks: an eighth of it, or up to twice the least a quarter, within the bounds."""
        if not self.least_bytes:
            return self.chunk_bytes
        part = max(-(-nbytes // 8), min(nbytes // 4, 2 * self.least_bytes), self.least_bytes)
        return min(-(-part // PAGE_BYTES) * PAGE_BYTES, self.chunk_bytes)

    @property
    def slot_bytes(self) -> int:
        """Of a ring's slots: a chunk and its trailer."""
        return self.chunk_bytes + TRAILER_ROOM

    @property
    def ring_bytes(self) -> int:
        return self.window * self.slot_bytes


class Posted(Protocol):
    """A slot on its way; `wait` blocks until it has gone or come. Raises RuntimeError."""

    def wait(self, timeout: timedelta) -> bool | None: ...


class LaneEnd:
    """One end of a lane: gives slots, sends or receives them in order, takes them back.

    What is answered here holds where chunks have a single way, so that nothing can be lost and moved.
    """

    ways = 1  # that chunks take in turn: the same number at both ends

    def rail(self, position: Position) -> str:
        """The name of the rail that a chunk takes, for people."""
        raise NotImplementedError

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        """The slot for the next chunk; at most a window of them is out at a time."""
        raise NotImplementedError

    def post(self, slot: torch.Tensor, length: int, position: Position) -> Posted:
        """Start sending or receiving the first `length` bytes and the trailer of a slot."""
        raise NotImplementedError

    def give(self, slot: torch.Tensor, event: Any) -> None:
        """Take a slot back, each once and in order; the device still reads it until `event`, where there is one."""
        raise NotImplementedError

    def movable(self) -> bool:
        """Whether chunks can take another rail when theirs is lost."""
        return False

    def route(self, position: Position) -> int:
        """The number of the rail that a chunk takes."""
        return 0

    def lose(self, loss: Loss) -> str:
        """Route around a lost rail from now on; its name, '' where that cannot be."""
        return ""

    def cut(self, rail: int) -> None:
        """End whatever still waits on a rail."""

    def watch(self, window: Movable) -> None:
        """Have somebody tell the window which rails are lost."""

    def landed(self, slot: torch.Tensor) -> torch.Tensor:
        """Where the oldest chunk that is received has come: in the slot that was given for it, as a rule."""
        return slot

    def idle(self) -> None:
        """Nothing is left to do for now: settle what was put off."""

    def advance(self) -> bool:
        """Whether a slot on its way needs this thread, which has just seen to it: to be asked again while it waits."""
        return False

    def disconnect(self) -> bool:
        """Nothing is under way: give this end up, where the other one does so too. Whether it is given up."""
        return False

    def close(self) -> None:
        """For good: let go of what this end alone holds."""


class RingEnd(LaneEnd):
    """One end of a ring. Received slots that a device may still read are freed once each, in order, as soon as it has
    passed the event behind them."""

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self._read: deque[Any] = deque()  # events, each behind what reads a slot; None: it is read

    def _free(self) -> None:
        """Tell the other end that the oldest slot is free."""
        raise NotImplementedError

    def give(self, slot: torch.Tensor, event: Any) -> None:
        if self.key.sending:
            return
        self._read.append(event)
        while self._read and (len(self._read) > LAG or passed(self._read[0])):
            self._free_oldest()

    def idle(self) -> None:
        while self._read:
            self._free_oldest()

    def _free_oldest(self) -> None:
        event = self._read.popleft()
        if event is not None:
            event.synchronize()
        self._free()


End = TypeVar("End", bound=RingEnd)


class RingTransport(Generic[End]):
    """The open ends of a transport whose lanes have a ring each, and what stops all of them at once."""

    def __init__(self) -> None:
        self._ends: dict[End, None] = {}  # in the order they came
        self._lock = threading.Lock()  # over the ends
        self._open = True
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)

    def hold(self, end: End) -> End:
        """Keep an end until the transport is closed. Raises RuntimeError where it is already."""
        with self._lock:
            if self._open:
                self._ends[end] = None
                return end
        end.close()
        raise RuntimeError("the connection was closed")

    def kill(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self._stop, 1)  # never read: it stays raised

    def end(self) -> list[End] | None:
        """Close all ends, which are returned; None where that was done before."""
        self.kill()
        with self._lock:
            ends, was_open = list(self._ends), self._open
            self._ends, self._open = {}, False
        for end in ends:
            end.close()
        if not was_open:
            return None
        os.close(self._stop)
        return ends
