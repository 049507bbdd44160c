"""The forwarded way of a bridge: a lane's thread copies chunks through host slots, several in flight at once.

So copies, the network and the other end's copies overlap, and receives are posted before their data comes. How a slot
travels is the affair of a lane's port: over gloo rails, or in memory that both processes share.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from hetctl.comm.bridge import METER, Bridge, LaneKey, Message
from hetctl.comm.layout import pieces
from hetctl.comm.staging import Copied, CopyEngine, TrailerMismatch, flat_bytes, seal, unseal
from hetctl.comm.work import BridgeError, reason_of

COPIES_AHEAD = 2  # copies that stay in flight while the window is full: one at a time would idle the copy engine
IDLE_SECONDS = 5.0  # an unused lane's thread ends; the next message starts another


class Posted(Protocol):
    """A slot on its way; `wait` blocks until it has gone or come. Raises RuntimeError."""

    def wait(self, timeout: timedelta) -> bool | None: ...


class Port(Protocol):
    """One end of a lane: gives slots, sends or receives them in order, takes them back."""

    def rail(self, number: int) -> str:
        """The name of the rail that chunk `number` of a message takes, for people."""

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        """The slot for the next chunk; at most a window of them is out at a time."""

    def post(self, slot: torch.Tensor, length: int, number: int) -> Posted:
        """Start sending or receiving the first `length` bytes and the trailer of a slot."""

    def give(self, slot: torch.Tensor, event: Any) -> None:
        """Take a slot back, in order; the device still reads it until `event`, where there is one."""

    def idle(self) -> None:
        """Nothing is left to do for now: settle what was put off."""


@dataclass(frozen=True)
class Flow:
    """The sizes of a transport, the same at both ends: bytes per chunk, and chunks in flight per lane."""

    chunk_bytes: int
    window: int  # together with the chunk it bounds a lane's memory


@dataclass(eq=False)
class _Chunk:
    message: Message
    first: int
    past: int
    number: int
    last: bool
    slot: torch.Tensor
    copied: Copied | None = None
    posted: Posted | None = None

    @property
    def length(self) -> int:
        return self.past - self.first


class ForwardedLane:
    """The queue and the thread shared by both directions."""

    verb = ""

    def __init__(
        self, bridge: Bridge, key: LaneKey, connect: Callable[[], Port], *, flow: Flow, engine: CopyEngine
    ) -> None:
        self._bridge, self._key, self._connect, self._flow, self._engine = bridge, key, connect, flow, engine
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._port: Port | None = None
        self._operation = 0  # messages whose chunks have all gone or come
        self._todo: deque[tuple[Message, int, int, int, bool]] = deque()  # first, past, number, last
        self._posted: deque[_Chunk] = deque()

    def put(self, message: Message) -> None:
        with self._lock:
            self._queue.put(message)
            if self._thread is None:
                name = f"het {self.verb} {self._key.peer} tag {self._key.tag}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def close(self, *, seconds: float) -> None:
        """Do what is queued and end the thread."""
        with self._lock:
            thread, self._closing = self._thread, True
        self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        self._port = None

    def _run(self) -> None:
        try:
            if self._key.device.type == "cuda":
                torch.cuda.set_device(self._key.device)
            while self._step():
                pass
        except Exception as error:  # the thread's boundary: any failure ends the group's operations
            self._broken(error)

    def _step(self) -> bool:
        raise NotImplementedError

    @property
    def port(self) -> Port:
        """This end of the lane, connected when the first message is there."""
        if self._port is None:
            self._port = self._connect()
        return self._port

    def _broken(self, error: Exception) -> None:
        """Stop; the pending messages end with the verdict on what is reported here."""
        with self._lock:
            self._thread = None
        if self._bridge.error is None:
            self._bridge.on_error(self._sentence(error))

    def _sentence(self, error: Exception) -> str:
        held = self._posted[0].message if self._posted else self._todo[0][0] if self._todo else None
        reason = reason_of(error)
        if self._port is not None and self._posted:
            reason = f"{self._port.rail(self._posted[0].number)}: {reason}"
        if held is not None and held.deadline.passed():
            reason = f"Timed out after {held.deadline.seconds:g} s"
        what = held.work.what if held is not None else "connecting"
        return f"{what} failed {self.verb} {self._bridge.who(self._key.peer)}: {reason}"

    def _more(self, *, block: bool) -> bool:
        """Cut the next queued message into chunks to do; False when there is none now (or none for a while)."""
        if self._todo:
            return True
        if block and self._port is not None:
            self._port.idle()
        try:
            message = self._queue.get(block, IDLE_SECONDS) if block else self._queue.get_nowait()
        except queue.Empty:
            return False
        if message is None:
            return False
        cut = list(pieces(message.data.nbytes, self._flow.chunk_bytes))
        for number, (first, past) in enumerate(cut):
            self._todo.append((message, first, past, number, number == len(cut) - 1))
        return True

    def _over(self) -> bool:
        """Whether the thread, having nothing to do, ends."""
        with self._lock:
            if not self._queue.empty():
                return False
            self._thread = None
            return True

    def _begin(self) -> _Chunk:
        message, first, past, number, last = self._todo[0]
        slot = self.port.take(past - first, number)
        self._todo.popleft()
        return _Chunk(message, first, past, number, last, slot)


class SendLane(ForwardedLane):
    verb = "sending to"

    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self._copying: deque[_Chunk] = deque()

    def _step(self) -> bool:
        """Start copies while slots are free, then send the oldest copied chunk or wait for the oldest sent one."""
        while len(self._copying) + len(self._posted) < self._flow.window:
            busy = bool(self._copying or self._posted)
            if not self._more(block=not busy):
                if not busy:
                    return not self._over()
                break
            self._copy(self._begin())
        more = bool(self._todo) or not self._queue.empty()
        if self._copying and (len(self._copying) > COPIES_AHEAD or not self._posted or not more):
            self._send()
        else:
            self._finish()
        return True

    def _copy(self, chunk: _Chunk) -> None:
        message = chunk.message
        source = flat_bytes(message.data)[chunk.first : chunk.past]
        chunk.copied = self._engine.out(source, chunk.slot, message.ready)
        self._copying.append(chunk)
        if not chunk.last:
            return
        message.copied_event = chunk.copied.event
        if message.copied is not None:
            message.copied.set()
        if message.copied_event is not None:
            # on a device the memory may be written again behind this event; `close` still sees the slots off
            self._bridge.end(message, ready=message.copied_event)

    def _send(self) -> None:
        chunk = self._copying.popleft()
        self._posted.append(chunk)
        assert chunk.copied is not None
        chunk.copied.wait()
        verify = self._bridge.verify
        seal(chunk.slot, operation=self._operation, chunk=chunk.number, length=chunk.length, checked=verify)
        chunk.posted = self.port.post(chunk.slot, chunk.length, chunk.number)
        METER.add(chunk.length)
        if chunk.last:
            self._operation += 1

    def _finish(self) -> None:
        chunk = self._posted[0]
        assert chunk.posted is not None
        if chunk.posted.wait(chunk.message.deadline.delta()) is False:
            raise BridgeError("it was aborted")
        self._posted.popleft()
        self.port.give(chunk.slot, None)
        if chunk.last:
            self._bridge.end(chunk.message, ready=chunk.message.copied_event)


class RecvLane(ForwardedLane):
    verb = "receiving from"

    def _step(self) -> bool:
        """Post receives while slots are free, then take in the oldest one."""
        while len(self._posted) < self._flow.window:
            if not self._more(block=not self._posted):
                if not self._posted:
                    return not self._over()
                break
            chunk = self._begin()
            chunk.posted = self.port.post(chunk.slot, chunk.length, chunk.number)
            self._posted.append(chunk)
        self._take(self._posted[0])
        self._posted.popleft()
        return True

    def _take(self, chunk: _Chunk) -> None:
        message = chunk.message
        assert chunk.posted is not None
        if chunk.posted.wait(message.deadline.delta()) is False:
            raise BridgeError("it was aborted")
        try:
            payload = unseal(
                chunk.slot,
                operation=self._operation,
                chunk=chunk.number,
                length=chunk.length,
                checked=self._bridge.verify,
            )
        except TrailerMismatch as mismatch:
            raise BridgeError(str(mismatch)) from None
        event = self._land(chunk, payload)
        self.port.give(chunk.slot, event)
        if chunk.last:
            self._operation += 1
            self._bridge.end(message, ready=event)

    def _land(self, chunk: _Chunk, payload: torch.Tensor) -> Any:
        message, ready = chunk.message, [chunk.message.ready]
        if message.after is not None and message.after.copied is not None:
            if not message.after.copied.wait(message.deadline.left()):
                raise BridgeError("the outgoing copy of the same memory did not end")
            ready.append(message.after.copied_event)
        size = message.data.element_size()
        target = message.data[chunk.first // size : chunk.past // size]
        return self._engine.into(payload, target, message.combine, ready)
