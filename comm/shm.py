"""The shm transport: for islands on one host, slots in memory that both processes map, and no socket in between.

The sender makes the memory (memfd) and two counters (eventfd: slots filled, slots freed) and hands them to the receiver
over a unix socket, which then only serves to notice that the other process is gone.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hetctl.comm.bridge import P2P, Bridge, LaneKey
from hetctl.comm.c10d import Store
from hetctl.comm.control import MOST_SECONDS
from hetctl.comm.failover import Position
from hetctl.comm.forwarded import Flow, ForwardedLane, RecvLane, SendLane
from hetctl.comm.leaving import Leaving
from hetctl.comm.meeting import TALK_SECONDS, Patience
from hetctl.comm.staging import engine_for
from hetctl.comm.units import MiB
from hetctl.comm.window import OneWay, Posted

MESSAGES = Flow(8 * MiB, window=8)  # larger than over rails: a chunk here costs Python time only
SUMS = Flow(16 * MiB, window=8)  # what collectives are made of comes in long rows: the first chunk's time is nothing


@dataclass(frozen=True)
class _Handles:
    """What both ends hold of one ring."""

    memory: int
    filled: int
    freed: int
    channel: socket.socket

    def close(self) -> None:
        for fd in (self.memory, self.filled, self.freed):
            os.close(fd)
        self.channel.close()


class ShmTransport:
    """Lanes over shared memory, one ring each."""

    def __init__(self) -> None:
        self._ports: list[ShmPort] = []
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)

    def lane(self, bridge: Bridge, key: LaneKey) -> ForwardedLane:
        made = SendLane if key.sending else RecvLane
        flow = MESSAGES if key.kind == P2P else SUMS
        connect = functools.partial(self._connect, bridge, key, flow)
        return made(bridge, key, connect, flow=flow, engine=engine_for(key.device))

    def _connect(self, bridge: Bridge, key: LaneKey, flow: Flow, patience: Patience) -> ShmPort:
        name = f"shm/{key.link_name(bridge.rank)}/{key.wire_tag}"
        meet = functools.partial(_offer, nbytes=flow.ring_bytes) if key.sending else _accept
        port = ShmPort(meet(bridge.store.clone(), name, patience), key, flow, stop=self._stop)
        self._ports.append(port)
        return port

    def kill(self) -> None:
        os.eventfd_write(self._stop, 1)  # never read: it stays raised

    def close(self) -> None:
        self.kill()
        for port in self._ports:
            port.close()
        self._ports = []
        os.close(self._stop)


class ShmPort(OneWay):
    """One end of a ring; slots are used in turn, filled by one end and freed by the other."""

    def __init__(self, handles: _Handles, key: LaneKey, flow: Flow, *, stop: int) -> None:
        self._handles, self._key, self._flow, self._stop = handles, key, flow, stop
        self._map = mmap.mmap(handles.memory, flow.ring_bytes)
        self._ring = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registered = key.device.type == "cuda" and pin(self._ring)
        self._next = 0
        self._leaving = Leaving(lambda: os.eventfd_write(handles.freed, 1))
        handles.channel.setblocking(False)

    def rail(self, position: Position) -> str:
        return "the shared-memory ring"

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        each = self._flow.slot_bytes
        first = self._next % self._flow.window * each
        self._next += 1
        return self._ring[first : first + each]

    def post(self, slot: torch.Tensor, length: int, position: Position) -> Posted:
        if self._key.sending:
            os.eventfd_write(self._handles.filled, 1)
        return self

    def wait(self, timeout: timedelta) -> bool:
        """Wait for the oldest posted slot: to be freed by the other end, or to be filled by it."""
        fd = self._handles.freed if self._key.sending else self._handles.filled
        if _taken(fd):
            return True
        self.idle()
        ready = _first_of((fd, self._stop, self._handles.channel.fileno()), timeout.total_seconds())
        if _taken(fd):
            return True
        if self._stop in ready:
            raise RuntimeError("the connection was closed")
        if ready:
            raise RuntimeError("the other process is gone: its end of the shared memory was closed")
        raise RuntimeError("timed out")

    def give(self, slot: torch.Tensor, event: Any) -> None:
        if self._key.sending:
            return
        self._leaving.give(event)

    def idle(self) -> None:
        """Free every slot that the device still reads, waiting for it: there is nothing else to do."""
        self._leaving.idle()

    def close(self) -> None:
        """Unpin and unmap the memory, close the counters and the socket."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())
        del self._ring
        with contextlib.suppress(BufferError):  # a slot that a failed lane still holds goes with that lane
            self._map.close()
        self._handles.close()


def _first_of(fds: Sequence[int], seconds: float) -> set[int]:
    """Which of these can be read first; none when the time is over."""
    poll, end = select.poll(), time.monotonic() + seconds
    for fd in fds:
        poll.register(fd, select.POLLIN)
    while True:
        left = end - time.monotonic()
        ready = {fd for fd, _ in poll.poll(min(max(left, 0), MOST_SECONDS) * 1000)}
        if ready or left <= MOST_SECONDS:
            return ready


def _taken(fd: int) -> bool:
    """Take one from a counter if it is above zero."""
    try:
        return os.eventfd_read(fd) > 0
    except BlockingIOError:
        return False


def pin(ring: torch.Tensor) -> bool:
    """Pin the ring for the device's copy engines. Raises RuntimeError: an unpinned ring would be silently slow."""
    code = torch.cuda.cudart().cudaHostRegister(ring.data_ptr(), ring.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"the device's driver does not pin shared memory (error {int(code)})")
    return True


def _offer(store: Store, name: str, patience: Patience, *, nbytes: int) -> _Handles:
    """Make a ring, say in the store where to get it, and hand it to the one who comes."""
    folder = tempfile.mkdtemp(prefix="hetctl-shm-")  # only this user may enter
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            path = str(Path(folder) / "ring")
            listener.bind(path)
            listener.listen(1)
            store.set(name, path)
            channel = patience.visitor(listener)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    memory = os.memfd_create("hetctl-ring", os.MFD_CLOEXEC)
    os.ftruncate(memory, nbytes)
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
    handles = _Handles(memory, os.eventfd(0, flags), os.eventfd(0, flags), channel)
    socket.send_fds(channel, [b"ring"], [handles.memory, handles.filled, handles.freed])
    return handles


def _accept(store: Store, name: str, patience: Patience) -> _Handles:
    """Get the ring that the sender made."""
    path = patience.said(store, name).decode()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.settimeout(TALK_SECONDS)
    channel.connect(path)
    word, fds, _, _ = socket.recv_fds(channel, 4, 3)
    if word != b"ring" or len(fds) != 3:
        raise RuntimeError("the sender's process closed the shared memory before handing it over")
    return _Handles(fds[0], fds[1], fds[2], channel)
