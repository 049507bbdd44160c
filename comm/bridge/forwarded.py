"""The forwarded way of a bridge: a lane's thread copies chunks through host slots, several in flight at once.

So copies, the network and the other end's copies overlap, and receives are posted before their data comes. How a slot
travels is the affair of a lane's end: over gloo rails, or in memory that both processes share.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hetctl.comm.bridge.bridge import Bridge, LaneKey, Message
from hetctl.comm.bridge.connecting import ConnectWait
from hetctl.comm.bridge.lane_end import Flow, LaneEnd
from hetctl.comm.bridge.staging import CopyEngine, seal, trailer_of, unseal
from hetctl.comm.bridge.window import Chunk, ThreadReplaced, Window
from hetctl.comm.operation.device import passed
from hetctl.comm.operation.intervals import spread
from hetctl.comm.operation.recorder import METER
from hetctl.comm.operation.views import may_write
from hetctl.comm.operation.work import reason_of

PYTHONS_SWITCH_SECONDS, SWITCH_SECONDS = 0.005, 0.0005  # after which a waiting thread is let in, by default and here
SOON_SECONDS, POLL_SECONDS = 200e-6, 50e-6  # within which a copy is over, and between looks at one that is not
IDLE_SECONDS = 5.0  # an unused lane's thread ends; the next message starts another


class _Disconnect:
    """In a lane's queue: give up what an idle lane can do without."""


class ForwardedLane:
    """The queue and the thread shared by both directions."""

    verb = ""

    def __init__(
        self, bridge: Bridge, key: LaneKey, connect: Callable[[ConnectWait], LaneEnd], *, flow: Flow, engine: CopyEngine
    ) -> None:
        self._bridge, self._key, self._connect, self._flow, self._engine = bridge, key, connect, flow, engine
        self._queue: queue.SimpleQueue[Message | _Disconnect | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._disconnecting = False  # asked to disconnect, and not yet seen to
        self.used = 0.0  # when it was given a message
        self._operation = 0  # messages whose chunks have all been begun
        self._todo: deque[tuple[Message, int, int, int, bool]] = deque()  # first, past, number, last
        self._cutting: Message | None = None  # taken from the queue, while the lane connects
        self._due: Message | None = None  # of those queued behind it, the one with the nearest deadline
        self._window: Window | None = None
        _switch_sooner()

    def put(self, message: Message) -> None:
        with self._lock:
            self.used = time.monotonic()
            if self._window is None and (self._due is None or message.deadline.left() < self._due.deadline.left()):
                self._due = message
            self._queue.put(message)
            if self._thread is None:
                self._start()

    @property
    def busy(self) -> bool:
        """Whether there is anything to send or to wait for; looked at from another thread, so in passing."""
        return bool(self._todo or self._on_way() or not self._queue.empty() or self._cutting)

    @property
    def moved(self) -> float:
        """When a chunk was last dealt with; 0 when none was."""
        window = self._window
        return window.moved if window is not None else 0.0

    def disconnect_idle(self) -> None:
        """Have the lane give up its connection if it is idle; the next message makes another one. Returns at once."""
        with self._lock:
            if self._window is None or self._closing or self._disconnecting:
                return
            self._disconnecting = True
            self._queue.put(_Disconnect())
            if self._thread is None:
                self._start()

    def rest(self, *, seconds: float) -> None:
        """Wait until the thread has let go of its last message, as `TaskQueue.rest`; not of a lane that connects."""
        with self._lock:
            if self._thread is None or self._window is None:
                return
            self._queue.put(rested := threading.Event())
        rested.wait(seconds)

    def _start(self) -> None:
        name = f"het {self.verb} {self._key.peer} tag {self._key.tag}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        """Go on in another thread: a lost rail keeps this lane's."""
        with self._lock:
            self._start()

    def close(self, *, seconds: float) -> None:
        """Do what is queued and end the thread."""
        with self._lock:
            thread, self._closing = self._thread, True
        self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        self._window = None

    def _run(self) -> None:
        try:
            self._engine.enter()
            while self._step():
                pass
        except ThreadReplaced:
            return
        except Exception as error:  # the thread's boundary: any failure ends the group's operations
            self._broken(error)

    def _step(self) -> bool:
        raise NotImplementedError

    @property
    def window(self) -> Window:
        """This end of the lane, connected when the first message is there."""
        if self._window is None:
            lane_end = self._connect(ConnectWait(self._over_waiting))
            window = Window(self._bridge, self._key, lane_end, length=self._flow.window, renew=self._renew)
            with self._lock:
                self._window, self._due = window, None
            lane_end.watch(window)
        return self._window

    def _over_waiting(self) -> str | None:
        """Why this lane need not wait any longer for its other end."""
        if self._bridge.error is not None:
            return "the connection was closed"
        return "timed out" if self._late() is not None else None

    def _late(self) -> Message | None:
        """The message whose time is over while the lane connects; a receive from any source has time for ever."""
        return next((m for m in (self._cutting, self._due) if m is not None and m.deadline.passed()), None)

    def _on_way(self) -> int:
        """How many chunks are posted."""
        window = self._window  # which may be given up meanwhile
        return len(window.posted) if window is not None else 0

    def _broken(self, error: Exception) -> None:
        """Stop; the pending messages end with the verdict on what is reported here."""
        with self._lock:
            self._thread = None
        if self._bridge.error is None:
            self._bridge.on_error(self._sentence(error))

    def _sentence(self, error: Exception) -> str:
        held, reason = self._held(), reason_of(error)
        if self._window is not None and self._window.posted:
            chunk = self._window.posted[0]
            held, reason = chunk.message, f"{self._window.lane_end.rail(chunk.position)}: {reason}"
        if held is not None and held.deadline.passed():
            reason = held.deadline.verdict
        idle = "connecting" if self._window is None else "a lane with nothing under way"
        what = held.work.what if held is not None else idle
        return f"{what} failed {self.verb} {self._bridge.who(self._key.peer)}: {reason}"

    def _held(self) -> Message | None:
        """The message that is worked on while nothing is under way."""
        return self._todo[0][0] if self._todo else self._late() or self._cutting

    def _more(self, *, block: bool) -> bool:
        """Cut the next queued message into chunks to do; False when there is none now (or none for a while)."""
        if self._todo:
            return True
        if block and self._window is not None:
            self._window.lane_end.idle()
        try:
            # what closes a lane may have been taken from the queue while something was under way
            message = self._queue.get(block, 0.0 if self._closing else IDLE_SECONDS)
        except queue.Empty:
            return False
        if isinstance(message, _Disconnect):
            self._disconnect(idle=block)
            return False
        if isinstance(message, threading.Event):
            message.set()
            return False
        if message is None:
            return False
        self._cutting = message
        nbytes = message.data.nbytes
        cut = spread(nbytes, self._flow.chunk_of(nbytes), self.window.lane_end.ways)
        self._cutting = None
        for number, (first, past) in enumerate(cut):
            self._todo.append((message, first, past, number, number == len(cut) - 1))
        return True

    def _disconnect(self, *, idle: bool) -> None:
        """Give the connection up if nothing is under way; else whoever asked will ask again."""
        given_up = idle and self._window is not None and self._window.lane_end.disconnect()
        with self._lock:
            self._disconnecting = False
            if given_up:
                self._window = None

    def _over(self) -> bool:
        """Whether the thread, having nothing to do, ends."""
        with self._lock:
            if not self._queue.empty():
                return False
            self._thread = None
            return True

    def _begin(self) -> Chunk:
        message, first, past, number, last = self._todo[0]
        slot = self.window.lane_end.take(past - first, number)
        self._todo.popleft()
        chunk = Chunk(message, first, past, (self._operation, number), last, slot)
        self._operation += last
        return chunk


def _switch_sooner() -> None:
    """Let lanes in while the program computes in Python: their turns are short, and what waits for one is a chunk.

    (DDP over islands 2+2, tcp: 1.74 of native's step instead of 1.91.) What a program has chosen for itself stays.
    """
    if sys.getswitchinterval() == PYTHONS_SWITCH_SECONDS:
        sys.setswitchinterval(SWITCH_SECONDS)


class SendLane(ForwardedLane):
    verb = "sending to"

    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self._copying: deque[Chunk] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._copying) or super().busy

    def _held(self) -> Message | None:
        return self._copying[0].message if self._copying else super()._held()

    def _step(self) -> bool:
        """Start copies while slots are free, then send the oldest copied chunk or wait for the oldest sent one."""
        while len(self._copying) + self._on_way() < self._flow.window:
            busy = bool(self._copying or self._on_way())
            if not self._more(block=not busy):
                if not busy:
                    return not self._over()
                break
            self._copy(self._begin())
        more = bool(self._todo) or not self._queue.empty()
        if self._copying and (len(self._copying) > self._flow.copies_ahead or not self._on_way() or not more):
            self._send()
        else:
            self._finish()
        return True

    def _copy(self, chunk: Chunk) -> None:
        message = chunk.message
        ready = None if chunk.first else message.ready
        chunk.sealed = not chunk.slot.is_cpu and not self._bridge.verify  # no sum: the copy brings the trailer
        trailer = trailer_of(chunk.position, chunk.length) if chunk.sealed else b""
        chunk.copied = self._engine.out(message, chunk.span, chunk.slot, ready, trailer)
        self._copying.append(chunk)
        if message.outgoing is not None:
            message.outgoing.add(chunk.past, chunk.copied)
        if chunk.last and chunk.copied is not None:
            # on a device the memory may be written again behind this event; `close` still sees the slots off
            self._bridge.end(message, ready=chunk.copied)

    def _send(self) -> None:
        chunk = self._copying[0]
        soon = time.monotonic() + SOON_SECONDS
        while not passed(chunk.copied) and self.window.lane_end.advance():
            if time.monotonic() > soon:  # it is behind something of the program's
                time.sleep(POLL_SECONDS)
        if chunk.copied is not None:
            chunk.copied.synchronize()
        if not chunk.sealed:
            seal(chunk.slot, chunk.position, chunk.length, checked=self._bridge.verify)
        self.window.post(chunk)
        self._copying.popleft()  # only now: a lane whose message has ended is busy until it was sent
        METER.add(chunk.length)

    def _finish(self) -> None:
        chunk = self.window.finish()
        self.window.retire(chunk)
        if chunk.last and chunk.copied is None:  # else its message has ended with the copy
            self._bridge.end(chunk.message)


class RecvLane(ForwardedLane):
    verb = "receiving from"

    def _step(self) -> bool:
        """Post receives while slots are free, then take in the oldest one."""
        while self._on_way() < self._flow.window:
            if not self._more(block=not self._on_way()):
                if not self._on_way():
                    return not self._over()
                break
            self.window.post(self._begin())
        self._take(self.window.finish())
        return True

    def _take(self, chunk: Chunk) -> None:
        message = chunk.message
        chunk.slot = self.window.lane_end.landed(chunk.slot)
        unseal(chunk.slot, chunk.position, chunk.length, checked=self._bridge.verify)
        with may_write([message.data]):
            landed = self._engine.into(chunk.slot, message.data, chunk.span, message.combine, self._until(chunk))
        self.window.retire(chunk, read=landed.read)
        if chunk.last:
            self._bridge.end(message, ready=landed.done)

    def _until(self, chunk: Chunk) -> list[Any]:
        """What must be over before a chunk lands."""
        message = chunk.message
        ready = [] if chunk.first else [message.ready]
        if message.after is not None and message.after.outgoing is not None:
            ready.append(message.after.outgoing.behind(chunk.past, message.deadline.left()))
        return ready
