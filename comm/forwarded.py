"""The forwarded bridge: tensors between islands by way of host slots, chunk by chunk over the rails.

A lane is one ordered stream of messages to or from one peer. Its thread keeps a few chunks in flight, so that copies,
the network and the other end's copies overlap, and so that receives are posted before their data comes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from hetctl.comm.c10d import Store
from hetctl.comm.rails import Link, Rail
from hetctl.comm.staging import (
    TRAILER_BYTES,
    Combine,
    Copied,
    CopyEngine,
    HostEngine,
    StreamEngine,
    TrailerMismatch,
    chunks,
    flat_bytes,
    seal,
    unseal,
)
from hetctl.comm.work import BridgeError, Deadline, HetWork

WINDOW = 8  # chunks in flight per lane
IDLE_SECONDS = 5.0  # an unused lane's thread ends; the next message starts another
P2P, COLLECTIVE = 0, 1
LaneKey = tuple[str, int, int]  # direction, peer, gloo tag


class Meter:
    """Bytes of payload that this process sent across islands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.sent += count


METER = Meter()


@dataclass
class Message:
    """One tensor on its way: flat, contiguous; `ready` is the event after which it may be read or written."""

    data: torch.Tensor
    work: HetWork
    deadline: Deadline
    ready: Any = None
    combine: Combine | None = None
    after: Message | None = None  # a send of the same memory whose copy must be out before this one lands
    copied: threading.Event | None = None
    copied_event: Any = None


@dataclass
class _Chunk:
    message: Message
    slot: torch.Tensor
    first: int
    past: int
    number: int
    last: bool
    rail: Rail
    copied: Copied | None = None
    work: Any = None


class Bridge:
    """Point-to-point between this rank and ranks of other islands, for one process group."""

    def __init__(self, rank: int, store: Store, *, timeout: timedelta, verify: bool, who: Callable[[int], str]) -> None:
        self._rank, self._store, self._timeout = rank, store.clone(), timeout
        self.verify, self.who = verify, who
        self._lock = threading.Lock()
        self._links: dict[tuple[str, int], Link] = {}
        self._lanes: dict[LaneKey, _Lane] = {}
        self._engines: dict[torch.device, CopyEngine] = {}
        self.error: BaseException | None = None
        self.on_error: Callable[[BaseException], None] = self.fail

    def send(self, data: torch.Tensor, peer: int, *, tag: int, kind: int, work: HetWork, deadline: Deadline) -> Message:
        """Queue the sending of a flat contiguous tensor; its work ends when the bytes have left."""
        message = Message(data, work, deadline, ready=self._event(data), copied=threading.Event())
        return self._put("to", peer, tag, kind, message)

    def recv(
        self,
        data: torch.Tensor,
        peer: int,
        *,
        tag: int,
        kind: int,
        work: HetWork,
        deadline: Deadline,
        combine: Combine | None = None,
        after: Message | None = None,
    ) -> Message:
        """Queue the receiving of a flat contiguous tensor, copied in or combined with what is there."""
        message = Message(data, work, deadline, ready=self._event(data), combine=combine, after=after)
        return self._put("from", peer, tag, kind, message)

    def _event(self, data: torch.Tensor) -> Any:
        if not data.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(data.device))
        return event

    def _put(self, way: str, peer: int, tag: int, kind: int, message: Message) -> Message:
        if self.error is not None:
            raise self.error
        with self._lock:
            key = (way, peer, tag << 1 | kind)
            lane = self._lanes.get(key)
            if lane is None:
                made = _SendLane if way == "to" else _RecvLane
                lane = self._lanes[key] = made(self, peer, key[2], self._link(way, peer))
        lane.put(message)
        return message

    def _link(self, way: str, peer: int) -> Link:
        if (way, peer) not in self._links:
            pair = f"{self._rank}-{peer}" if way == "to" else f"{peer}-{self._rank}"
            link = Link(self._store, f"link/{pair}", sending=way == "to", timeout=self._timeout)
            self._links[way, peer] = link
        return self._links[way, peer]

    def engine(self, device: torch.device) -> CopyEngine:
        """The copy engine of a device, made when first needed."""
        with self._lock:
            if device not in self._engines:
                self._engines[device] = StreamEngine(device) if device.type == "cuda" else HostEngine()
            return self._engines[device]

    def fail(self, error: BaseException) -> None:
        """End every pending message, here and at the other ends, with `error`."""
        with self._lock:
            if self.error is None:
                self.error = error
            links, lanes = list(self._links.values()), list(self._lanes.values())
        for link in links:
            link.kill()
        for lane in lanes:
            lane.drain(error)

    def close(self) -> None:
        """End lanes (after what they still hold) and connections."""
        with self._lock:
            lanes, links = list(self._lanes.values()), list(self._links.values())
            self._lanes, self._links = {}, {}
            self.error = self.error or BridgeError("the process group was destroyed")
        for lane in lanes:
            lane.close()
        for link in links:
            link.close()


class _Lane:
    """The queue and the thread shared by both directions."""

    verb = ""

    def __init__(self, bridge: Bridge, peer: int, tag: int, link: Link) -> None:
        self._bridge, self._peer, self._tag, self._link = bridge, peer, tag, link
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._operation = 0
        self._pending: deque[_Chunk] = deque()
        self._feed: deque[_Chunk] = deque()
        self._current: deque[tuple[Message, int, int, int, bool]] = deque()

    def put(self, message: Message) -> None:
        with self._lock:
            self._queue.put(message)
            if self._thread is None:
                name = f"het {self.verb} {self._peer} tag {self._tag}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            thread, self._closing = self._thread, True
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join(timeout=10)

    def drain(self, error: BaseException) -> None:
        """Fail whatever waits in the queue; what the thread holds fails with the connection."""
        while True:
            try:
                message = self._queue.get_nowait()
            except queue.Empty:
                return
            if message is None:
                self._queue.put(None)
                return
            self._end(message, error=error)

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except Exception as error:  # the thread's boundary: any failure ends the group's operations
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        current = self._pending[0].message if self._pending else (self._current[0][0] if self._current else None)
        known = self._bridge.error
        shown = known or BridgeError(self._sentence(error, current))
        with self._lock:
            self._thread = None
        held = {id(c.message): c.message for c in self._pending} | {id(c[0]): c[0] for c in self._current}
        self._pending.clear()
        self._current.clear()
        if known is None:
            self._bridge.on_error(shown)
        for message in held.values():
            self._end(message, error=shown)
        self.drain(shown)

    def _sentence(self, error: Exception, message: Message | None) -> str:
        what = message.work.what if message else self.verb
        detail = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        return f"{what} failed: {self.verb} {self._bridge.who(self._peer)}: {detail}"

    def _end(self, message: Message, *, ready: Any = None, error: BaseException | None = None) -> None:
        if message.copied is not None:
            message.copied.set()
        message.work.finish(ready=ready, error=error)

    def _next(self, *, block: bool) -> bool:
        """Cut the next queued message into chunks to do; False when there is none (or, blocking, when all is over)."""
        while True:
            try:
                message = self._queue.get(block, IDLE_SECONDS) if block else self._queue.get_nowait()
            except queue.Empty:
                return False
            if message is None:
                self._queue.put(None)
                return False
            if message.data.is_cuda:
                torch.cuda.set_device(message.data.device)
            parts = chunks(message.data.numel() * message.data.element_size())
            for number, (first, past) in enumerate(parts):
                self._current.append((message, first, past, number, number == len(parts) - 1))
            return True

    def _idle(self) -> bool:
        """Whether the thread may end: nothing held and nothing queued."""
        with self._lock:
            if not self._queue.empty() and not self._closing:
                return False
            self._thread = None
            return True

    def _start(self) -> _Chunk:
        message, first, past, number, last = self._current.popleft()
        rails = self._link.rails()
        if not rails:
            raise self._bridge.error or BridgeError("the connection is closed")
        slot = self._bridge.engine(message.data.device).take(past - first)
        return _Chunk(message, slot, first, past, number, last, rails[number % len(rails)])

    def _work(self) -> bool:
        raise NotImplementedError


class _SendLane(_Lane):
    verb = "sending to"

    def __init__(self, bridge: Bridge, peer: int, tag: int, link: Link) -> None:
        super().__init__(bridge, peer, tag, link)
        self._copying: deque[_Chunk] = deque()

    def _work(self) -> bool:
        """Start copies while slots are free, send the oldest copied chunk, or wait for the oldest sent one."""
        while len(self._copying) + len(self._pending) < WINDOW:
            busy = bool(self._copying or self._pending)
            if not self._current and not self._next(block=not busy):
                if not busy and self._idle():
                    return False
                break
            self._copy(self._start())
        if self._copying:
            self._post(self._copying.popleft())
        elif self._pending:
            self._finish(self._pending.popleft())
        return True

    def _copy(self, chunk: _Chunk) -> None:
        source = flat_bytes(chunk.message.data)[chunk.first : chunk.past]
        chunk.copied = self._bridge.engine(source.device).out(source, chunk.slot, chunk.message.ready)
        self._copying.append(chunk)
        if chunk.last and chunk.message.copied is not None:
            chunk.message.copied_event = getattr(chunk.copied, "event", None)
            chunk.message.copied.set()

    def _post(self, chunk: _Chunk) -> None:
        assert chunk.copied is not None
        self._pending.append(chunk)
        chunk.copied.wait()
        length = chunk.past - chunk.first
        whole = seal(
            chunk.slot, operation=self._operation, chunk=chunk.number, length=length, checked=self._bridge.verify
        )
        chunk.work = chunk.rail.group.send([whole], 1, self._tag)
        METER.add(length)
        if chunk.last:
            self._operation += 1

    def _finish(self, chunk: _Chunk) -> None:
        self._pending.appendleft(chunk)  # so that a failure knows whose it is
        if not chunk.work.wait(chunk.message.deadline.delta()):
            raise BridgeError("aborted")
        self._pending.popleft()
        self._bridge.engine(chunk.message.data.device).give(chunk.slot)
        if chunk.last:
            self._end(chunk.message, ready=chunk.message.copied_event)


class _RecvLane(_Lane):
    verb = "receiving from"

    def __init__(self, bridge: Bridge, peer: int, tag: int, link: Link) -> None:
        super().__init__(bridge, peer, tag, link)
        self._posted_operation = 0

    def _work(self) -> bool:
        """Post receives while slots are free, then take in the oldest posted chunk."""
        while len(self._pending) < WINDOW:
            if not self._current and not self._next(block=not self._pending):
                if not self._pending and self._idle():
                    return False
                break
            chunk = self._start()
            whole = chunk.slot[: chunk.past - chunk.first + TRAILER_BYTES]
            chunk.work = chunk.rail.group.recv([whole], 0, self._tag)
            self._pending.append(chunk)
        if self._pending:
            self._take(self._pending[0])
            self._pending.popleft()
        return True

    def _take(self, chunk: _Chunk) -> None:
        message = chunk.message
        if not chunk.work.wait(message.deadline.delta()):
            raise BridgeError("aborted")
        try:
            payload = unseal(
                chunk.slot,
                operation=self._operation,
                chunk=chunk.number,
                length=chunk.past - chunk.first,
                checked=self._bridge.verify,
            )
        except TrailerMismatch as mismatch:
            raise BridgeError(f"{chunk.rail.name}: {mismatch}") from None
        event = self._land(chunk, payload)
        engine = self._bridge.engine(message.data.device)
        engine.give(chunk.slot) if event is None else engine.give_after(chunk.slot, event)
        if chunk.last:
            self._operation += 1
            self._end(message, ready=event)

    def _land(self, chunk: _Chunk, payload: torch.Tensor) -> Any:
        message, ready = chunk.message, chunk.message.ready
        if message.after is not None and message.after.copied is not None:
            if not message.after.copied.wait(message.deadline.left()):
                raise BridgeError("the outgoing copy of the same memory did not end")
            ready = message.after.copied_event or ready
        size = message.data.element_size()
        target = message.data[chunk.first // size : chunk.past // size]
        return self._bridge.engine(message.data.device).into(payload, target, message.combine, ready)
