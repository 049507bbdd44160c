"""The shm transport: for islands on one host, slots in memory that both processes map, and no socket in between.

The sender makes the memory (memfd) and two counters (eventfd: slots filled, slots freed) and hands them to the receiver
over a unix socket, which then only serves to notice that the other process is gone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import resource
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from hetctl.comm.bridge.bridge import P2P, Bridge, LaneKey
from hetctl.comm.bridge.connecting import HANDSHAKE_SECONDS, MOST_SECONDS, ConnectWait
from hetctl.comm.bridge.device_memory import pin, unpin
from hetctl.comm.bridge.failover import Position
from hetctl.comm.bridge.forwarded import ForwardedLane, RecvLane, SendLane
from hetctl.comm.bridge.lane_end import Flow, Posted, RingEnd, RingTransport
from hetctl.comm.bridge.staging import engine_for
from hetctl.comm.bridge.transports import Making
from hetctl.comm.contract.units import MiB
from hetctl.comm.operation.work import OperationDeadline, Store

MESSAGES = Flow(8 * MiB, window=8)  # larger than over rails: a chunk here costs Python time only
MOST_RINGS = 16  # of messages to or from one peer, while their lanes are idle: one is 64 MiB and five descriptors
UNUSED_SECONDS = 10.0  # after which those beyond it disconnect: making a ring anew costs milliseconds, and pinning it
MOST_OF_ALL = 64  # beyond it they disconnect however lately they were used
SUMS = Flow(16 * MiB, window=8)  # what collectives are made of comes in long rows: the first chunk's time is nothing
_GIVEN_UP = b"."
_NOT_YET = torch.empty(0, dtype=torch.uint8)


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


NextRing = Callable[[ConnectWait], _Handles]  # makes or gets the next one of a lane, together with the other end


class ShmTransport(RingTransport["ShmLaneEnd"]):
    """Lanes over shared memory, one ring each; of idle lanes of messages, few keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._lanes: dict[LaneKey, ForwardedLane] = {}

    def lane(self, bridge: Bridge, key: LaneKey) -> ForwardedLane:
        made = SendLane if key.sending else RecvLane
        flow = MESSAGES if key.kind == P2P else SUMS
        connect = functools.partial(self._connect, _rings(bridge, key, flow.ring_bytes), key, flow)
        lane = self._lanes[key] = made(bridge, key, connect, flow=flow, engine=engine_for(key.device))
        if len(self._lanes) > MOST_RINGS:  # busy ones wait for no other: the peer may want any of them first
            _allow_more_descriptors()
        return lane

    def _connect(self, next_ring: NextRing, key: LaneKey, flow: Flow, connect_wait: ConnectWait) -> ShmLaneEnd:
        self._spare(key)
        return self.hold(ShmLaneEnd(next_ring, key, flow, connect_wait, stop=self._stop, forget=self._forget))

    def _spare(self, key: LaneKey) -> None:
        """Have the lanes disconnect that were used longest ago: a program may take a new tag for each of its steps."""
        with self._lock:
            held = [end.key for end in self._ends]
        alike = [k for k in held if (k.kind, k.sending, k.peer) == (P2P, key.sending, key.peer)]
        lanes = sorted((self._lanes[k] for k in alike), key=lambda lane: lane.used)
        late = time.monotonic() - UNUSED_SECONDS
        for number, lane in enumerate(lanes[: max(len(lanes) + 1 - MOST_RINGS, 0)]):
            if lane.used < late or len(lanes) - number >= MOST_OF_ALL:
                lane.disconnect_idle()

    def _forget(self, end: ShmLaneEnd) -> None:
        with self._lock:
            self._ends.pop(end, None)

    def close(self) -> None:
        self.end()
        self._lanes = {}


def make(making: Making) -> ShmTransport:
    """What the table of transports names."""
    return ShmTransport()


def _rings(bridge: Bridge, key: LaneKey, nbytes: int) -> NextRing:
    """The rings of one lane, one after the other: both ends count them, and meet for each under its number."""
    meet = functools.partial(_offer, nbytes=nbytes) if key.sending else _accept
    name, numbers = f"shm/{key.link_name(bridge.rank)}/{key.wire_tag}", itertools.count()
    return lambda connect_wait: meet(bridge.store.talk, f"{name}/{next(numbers)}", connect_wait)


class ShmLaneEnd(RingEnd):
    """One end of a ring; slots are used in turn, filled by one end and freed by the other.

    A sender whose slots are all free again may give the ring up, and says so; the receiver, which may wait for the next
    slot by then, goes on with the next ring. So its slots are only known when something has come.
    """

    def __init__(
        self,
        next_ring: NextRing,
        key: LaneKey,
        flow: Flow,
        connect_wait: ConnectWait,
        *,
        stop: int,
        forget: Callable[[ShmLaneEnd], None],
    ) -> None:
        super().__init__(key)
        self._next_ring, self._flow, self._stop = next_ring, flow, stop
        self._connect_wait, self._forget = connect_wait, forget
        self._lock, self._held, self._closed = threading.Lock(), False, False
        self._begin(connect_wait)

    def _begin(self, connect_wait: ConnectWait) -> None:
        """Go on with the next ring."""
        handles = self._next_ring(connect_wait)
        handles.channel.setblocking(False)
        with self._lock:
            if self._closed:
                handles.close()
                raise RuntimeError("the connection was closed")
            self._handles, self._next, self._held = handles, 0, True
            self._map = mmap.mmap(handles.memory, self._flow.ring_bytes)
            self._ring = torch.frombuffer(memoryview(self._map), dtype=torch.uint8)  # the view keeps it mapped
            self._registered = pin(self._ring, self.key.device)

    def _end(self) -> None:
        """Unpin and unmap the memory, close the counters and the socket."""
        with self._lock:
            held, self._held = self._held, False
            if not held:
                return
            if self._registered:
                unpin(self._ring)
            del self._ring
            with contextlib.suppress(BufferError):  # a slot that a failed lane still holds goes with that lane
                self._map.close()
            self._handles.close()

    def _free(self) -> None:
        self._count(self._handles.freed)

    def _count(self, fd: int) -> None:
        """Add one to a counter while it is ours: once another thread closes this end its number is somebody else's."""
        with self._lock:
            if self._held:
                os.eventfd_write(fd, 1)

    def rail(self, position: Position) -> str:
        return "the shared-memory ring"

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        return self._slot() if self.key.sending else _NOT_YET

    def landed(self, slot: torch.Tensor) -> torch.Tensor:
        return self._slot()

    def _slot(self) -> torch.Tensor:
        """The next one in turn."""
        each = self._flow.slot_bytes
        first = self._next % self._flow.window * each
        self._next += 1
        return self._ring[first : first + each]

    def post(self, slot: torch.Tensor, length: int, position: Position) -> Posted:
        if self.key.sending:
            self._count(self._handles.filled)
        return self

    def wait(self, timeout: timedelta) -> bool:
        """Wait for the oldest posted slot: to be freed by the other end, or to be filled by it."""
        if self._taken():
            return True
        self.idle()
        deadline = OperationDeadline(timeout.total_seconds())
        while not self._comes(deadline):
            self._end()
            self._begin(self._connect_wait.within(deadline))
        return True

    def _awaited(self) -> int:
        return self._handles.freed if self.key.sending else self._handles.filled

    def _taken(self) -> bool:
        """Take one from the awaited counter if it is above zero."""
        with self._lock, contextlib.suppress(BlockingIOError):
            return self._held and os.eventfd_read(self._awaited()) > 0
        return False

    def _comes(self, deadline: OperationDeadline) -> bool:
        """Wait for the oldest posted slot; False when the sender has given this ring up. Raises RuntimeError."""
        ready = _first_of((self._awaited(), self._stop, self._handles.channel.fileno()), deadline.left())
        if self._taken():
            return True
        if self._stop in ready or not self._held:
            raise RuntimeError("the connection was closed")
        if not ready:
            raise RuntimeError("timed out")
        if self._given_up():
            return False
        raise RuntimeError("the other process is gone: its end of the shared memory was closed")

    def _given_up(self) -> bool:
        """Whether the sender has said that it gives this ring up."""
        try:
            return self._handles.channel.recv(len(_GIVEN_UP)) == _GIVEN_UP
        except OSError:
            return False

    def disconnect(self) -> bool:
        if not self.key.sending and not self._given_up():
            return False
        if self.key.sending:
            with contextlib.suppress(OSError):  # it is gone, which the next message will find out
                self._handles.channel.send(_GIVEN_UP)
        self.close()
        self._forget(self)
        return True

    def close(self) -> None:
        """For good."""
        with self._lock:
            self._closed = True
        self._end()


def _allow_more_descriptors() -> None:
    """Up to what the system allows this process, which is more than what it starts with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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


def _offer(store: Store, name: str, connect_wait: ConnectWait, *, nbytes: int) -> _Handles:
    """Make a ring, say in the store where to get it, and hand it to the one who comes."""
    # only this user may enter; a process that exits while a lane waits here removes it as well
    folder = tempfile.TemporaryDirectory(prefix="hetctl-shm-", ignore_cleanup_errors=True)
    with folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = str(Path(folder.name) / "ring")
        listener.bind(path)
        listener.listen(1)
        store.set(name, path)
        channel = connect_wait.accept(listener)
    memory = os.memfd_create("hetctl-ring", os.MFD_CLOEXEC)
    os.ftruncate(memory, nbytes)
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
    handles = _Handles(memory, os.eventfd(0, flags), os.eventfd(0, flags), channel)
    socket.send_fds(channel, [b"ring"], [handles.memory, handles.filled, handles.freed])
    return handles


def _accept(store: Store, name: str, connect_wait: ConnectWait) -> _Handles:
    """Get the ring that the sender made."""
    path = connect_wait.value_of(store, name).decode()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.settimeout(HANDSHAKE_SECONDS)
    channel.connect(path)
    word, fds, _, _ = socket.recv_fds(channel, 4, 3)
    if word != b"ring" or len(fds) != 3:
        raise RuntimeError("the sender's process closed the shared memory before handing it over")
    return _Handles(fds[0], fds[1], fds[2], channel)
