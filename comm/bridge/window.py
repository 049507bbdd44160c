"""The chunks of a lane that are on their way: posted in order, awaited in order, moved when their rail is lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from hetctl.comm.bridge.bridge import Bridge, LaneKey, Message
from hetctl.comm.bridge.failover import STALL_SECONDS, Loss, Position, Stall
from hetctl.comm.bridge.staging import Copied, Span
from hetctl.comm.operation.device import module_of
from hetctl.comm.operation.work import BridgeError

MOVE_SECONDS = 4.0  # for both ends to agree that a broken rail's chunks take others
WAKE_SECONDS = 0.5  # for a cut rail to let go of the thread that waits on it


class ThreadReplaced(Exception):
    """This thread was held by a lost rail for so long that another one does its lane's work now."""


class Posted(Protocol):
    """A slot on its way; `wait` blocks until it has gone or come. Raises RuntimeError."""

    def wait(self, timeout: timedelta) -> bool | None: ...


class LaneEnd(Protocol):
    """One end of a lane: gives slots, sends or receives them in order, takes them back."""

    ways: int  # that chunks take in turn: the same number at both ends

    def rail(self, position: Position) -> str:
        """The name of the rail that a chunk takes, for people."""

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        """The slot for the next chunk; at most a window of them is out at a time."""

    def post(self, slot: torch.Tensor, length: int, position: Position) -> Posted:
        """Start sending or receiving the first `length` bytes and the trailer of a slot."""

    def movable(self) -> bool:
        """Whether chunks can take another rail when theirs is lost."""

    def route(self, position: Position) -> int:
        """The number of the rail that a chunk takes."""

    def lose(self, loss: Loss) -> str:
        """Route around a lost rail from now on; its name, '' where that cannot be."""

    def cut(self, rail: int) -> None:
        """End whatever still waits on a rail."""

    def watch(self, window: Window) -> None:
        """Have somebody tell the window which rails are lost."""

    def landed(self, slot: torch.Tensor) -> torch.Tensor:
        """Where the oldest chunk that is received has come: in the slot that was given for it, as a rule."""

    def give(self, slot: torch.Tensor, event: Any) -> None:
        """Take a slot back, in order; the device still reads it until `event`, where there is one."""

    def idle(self) -> None:
        """Nothing is left to do for now: settle what was put off."""

    def advance(self) -> bool:
        """Whether a slot on its way needs this thread, which has just seen to it: to be asked again while it waits."""

    def rest(self) -> bool:
        """Nothing is under way: give this end up, where the other one does so too. Whether it is given up."""


class OneWay:
    """What a port answers that has a single way for its chunks: nothing can be lost and moved."""

    ways = 1

    def movable(self) -> bool:
        return False

    def route(self, position: Position) -> int:
        return 0

    def lose(self, loss: Loss) -> str:
        return ""

    def cut(self, rail: int) -> None:
        return None

    def watch(self, window: Window) -> None:
        return None

    def landed(self, slot: torch.Tensor) -> torch.Tensor:
        return slot

    def advance(self) -> bool:
        return False

    def rest(self) -> bool:
        return False


@dataclass(eq=False)
class Chunk:
    """Bytes [first, past) of a message, in a slot."""

    message: Message
    first: int
    past: int
    position: Position
    last: bool
    slot: torch.Tensor
    copied: Copied | None = None
    sealed: bool = False  # its trailer came with the copy
    posted: Posted | None = None
    since: float = 0.0  # when it was posted
    done: bool = False

    @property
    def length(self) -> int:
        return self.past - self.first

    @property
    def span(self) -> Span:
        return self.first, self.past


@dataclass(frozen=True)
class _Kept:
    """A chunk that is done here, but that a lost rail may owe the other end."""

    position: Position
    length: int
    slot: torch.Tensor
    since: float


class Window:
    """One lane's posted chunks. Its thread posts and awaits them; the watch over rails may move them meanwhile."""

    def __init__(self, bridge: Bridge, key: LaneKey, port: LaneEnd, *, length: int, renew: Callable[[], None]) -> None:
        self.port, self.posted = port, deque[Chunk]()
        self._renew = renew  # has another thread go on
        self._owner: threading.Thread | None = None  # who waits,
        self._awaited: Posted | None = None  # and for what
        self._bridge, self._key, self._length = bridge, key, length
        self._kept: deque[_Kept] = deque()
        self._aside: list[Any] = []  # memory and handles that a lost rail may still touch
        self._changed = threading.Condition(threading.RLock())  # over both deques and the port's routes
        self._broken = False
        self.moved = 0.0  # when a chunk was last dealt with

    def post(self, chunk: Chunk) -> None:
        """Start a chunk on its rail."""
        with self._changed:
            self._start(chunk, chunk.slot)
            self.posted.append(chunk)

    def _start(self, chunk: Chunk, slot: torch.Tensor) -> None:
        chunk.posted, chunk.since = self.port.post(slot, chunk.length, chunk.position), time.monotonic()
        chunk.slot = slot

    def finish(self) -> Chunk:
        """Wait until the oldest chunk has gone or come, by whichever rail in the end. Raises RuntimeError."""
        chunk = self.posted[0]
        while not chunk.done:
            with self._changed:
                posted = self._awaited = chunk.posted
                self._owner = threading.current_thread()
            assert posted is not None
            try:
                if not self._waited(posted, chunk.message.deadline.delta()):
                    raise BridgeError("it was aborted")
                with self._changed:
                    chunk.done = chunk.posted is posted
            except RuntimeError:
                if not self._moves(chunk, posted):
                    raise
        return chunk

    def _waited(self, posted: Posted, timeout: timedelta) -> bool:
        """Wait for what was posted. Raises RuntimeError when it failed, Left where this thread came back too late."""
        try:
            return posted.wait(timeout) is not False
        finally:
            with self._changed:
                if self._owner is not threading.current_thread():
                    raise ThreadReplaced
                self._awaited = None
                self._changed.notify_all()

    def _moves(self, chunk: Chunk, posted: Posted) -> bool:
        """Whether a chunk whose rail broke takes another one; waits a while for both ends to agree on it."""
        deadline = chunk.message.deadline
        with self._changed:
            if self.port.movable() and self._bridge.error is None and not deadline.passed():
                self._broken = True
                ended = lambda: chunk.posted is not posted or self._bridge.error is not None  # noqa: E731
                self._changed.wait_for(ended, min(MOVE_SECONDS, deadline.left()))
                self._broken = False
            return chunk.posted is not posted

    def retire(self, chunk: Chunk) -> None:
        """The oldest chunk is dealt with: its slot, or an older one that is owed no more, goes back.

        Receives are posted a window ahead of the oldest one, and gloo sends what is posted: when a chunk has gone,
        the one a window before it has come. A rail that is lost unnoticed may take chunks that nobody waits for, so
        only another rail's chunk proves that, unless it is lost as well. (A receiver may come two windows further
        until it hears of a loss.)
        """
        with self._changed:
            self.posted.popleft()
            self.moved = time.monotonic()
            if not self.port.movable():
                self._give(chunk.slot)
                return
            slot = chunk.slot if self._key.sending else _NOWHERE
            self._kept.append(_Kept(chunk.position, chunk.length, slot, chunk.since))
            while self._has_come(self._kept[0]):
                self._give(self._kept.popleft().slot)

    def _has_come(self, oldest: _Kept) -> bool:
        """Whether the last chunk that was done proves that the oldest one kept is owed no more."""
        if not self._key.sending:
            return len(self._kept) > 2 * self._length
        others = self.port.route(self._kept[-1].position) != self.port.route(oldest.position)
        return others and len(self._kept) > self._length

    def _give(self, slot: torch.Tensor) -> None:
        if self._key.sending:  # a receiver gives its slots itself, with the event that they are read behind
            self.port.give(slot, None)

    def stall(self) -> Stall | None:
        """The chunk that is waited for, and since when nothing came: behind others on slow rails it is not late."""
        with self._changed:
            if not self.posted or self.posted[0].done:
                return None
            chunk = self.posted[0]
            rail = self.port.route(chunk.position)
            return Stall(chunk.position, rail, time.monotonic() - max(chunk.since, self.moved), self._broken)

    def is_late(self, position: Position) -> bool:
        """Whether a chunk was given to its rail long ago; not when it was not yet."""
        with self._changed:
            found = [c.since for c in self._all() if c.position == position]
            return bool(found) and time.monotonic() - found[0] > STALL_SECONDS

    def _all(self) -> list[Chunk | _Kept]:
        """What was posted, oldest first."""
        return [*self._kept, *self.posted]

    def lose(self, loss: Loss) -> str:
        """Start what a lost rail owes over other rails, and everything after it; the rail's name, '' for the last."""
        module_of(self._key.device).set_device(self._key.device)
        with self._changed:
            late = [c for c in self._all() if c.position >= loss.since]
            pending_device_work = [c for c in late if self.port.route(c.position) == loss.rail]
            name = self.port.lose(loss)
            if not name:
                return ""
            moved = [chunk.posted for chunk in pending_device_work if isinstance(chunk, Chunk)]
            for chunk in pending_device_work:
                self._again(chunk)
            self._changed.notify_all()
        self.port.cut(loss.rail)
        self._free(moved)
        return name

    def _free(self, moved: Sequence[Posted | None]) -> None:
        """Let another thread go on where a lost rail keeps this lane's: gloo wakes nobody who waits for a chunk that
        was under way, before its deadline."""
        with self._changed:
            if self._changed.wait_for(lambda: self._awaited is None or self._awaited not in moved, WAKE_SECONDS):
                return
            self._owner = self._awaited = None
        self._renew()

    def _again(self, chunk: Chunk | _Kept) -> None:
        """Start a chunk anew; what a lost rail may still read or write is left alone."""
        slot = chunk.slot if self._key.sending else self.port.take(chunk.length, chunk.position[1])
        if isinstance(chunk, Chunk) and not chunk.done:
            self._aside.append((chunk.slot, chunk.posted))
            self._start(chunk, slot)
            return
        # sent, or come all the same: what is sent again has to go somewhere
        self._aside.append((slot, self.port.post(slot, chunk.length, chunk.position)))


_NOWHERE = torch.empty(0, dtype=torch.uint8)
