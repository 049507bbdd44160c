"""The chunks of a lane that are on their way: posted in order, awaited in order, moved when their rail is lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from hetctl.comm.bridge.bridge import Bridge, LaneKey, Message
from hetctl.comm.bridge.failover import STALL_SECONDS, Loss, Position, Stall
from hetctl.comm.bridge.lane_end import LaneEnd, Posted
from hetctl.comm.bridge.staging import Span
from hetctl.comm.operation.device import module_of
from hetctl.comm.operation.work import BridgeError

MOVE_SECONDS = 4.0  # for both ends to agree that a broken rail's chunks take others
WAKE_SECONDS = 0.5  # for a cut rail to let go of the thread that waits on it


class ThreadReplaced(Exception):
    """This thread was held by a lost rail for so long that another one does its lane's work now."""


@dataclass(eq=False)
class Chunk:
    """Bytes [first, past) of a message, in a slot."""

    message: Message
    first: int
    past: int
    position: Position
    last: bool
    slot: torch.Tensor
    copied: Any = None  # the event behind which it is in its slot; None: it is, or nothing was copied
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

    def __init__(
        self, bridge: Bridge, key: LaneKey, lane_end: LaneEnd, *, length: int, renew: Callable[[], None]
    ) -> None:
        self.lane_end, self.posted = lane_end, deque[Chunk]()
        self._renew = renew  # has another thread go on
        self._owner: threading.Thread | None = None  # who waits,
        self._awaited: Posted | None = None  # and for what
        self._bridge, self._key, self._length = bridge, key, length
        self._kept: deque[_Kept] = deque()
        self._abandoned: list[Any] = []  # memory and handles that a lost rail may still touch
        self._changed = threading.Condition(threading.RLock())  # over both deques and the lane end's routes
        self._broken = False
        self.moved = 0.0  # when a chunk was last dealt with

    def post(self, chunk: Chunk) -> None:
        """Start a chunk on its rail."""
        with self._changed:
            self._start(chunk, chunk.slot)
            self.posted.append(chunk)

    def _start(self, chunk: Chunk, slot: torch.Tensor) -> None:
        chunk.posted, chunk.since = self.lane_end.post(slot, chunk.length, chunk.position), time.monotonic()
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
        """Wait for what was posted. Raises RuntimeError when it failed, ThreadReplaced when too late."""
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
            if self.lane_end.movable() and self._bridge.error is None and not deadline.passed():
                self._broken = True
                ended = lambda: chunk.posted is not posted or self._bridge.error is not None  # noqa: E731
                self._changed.wait_for(ended, min(MOVE_SECONDS, deadline.left()))
                self._broken = False
            return chunk.posted is not posted

    def retire(self, chunk: Chunk, *, read: Any = None) -> None:
        """The oldest chunk is dealt with. A received slot goes back, to be free behind `read`; of those that were sent,
        the ones that are owed no more.

        Receives are posted a window ahead of the oldest one, and gloo sends what is posted: when a chunk has gone,
        the one a window before it has come. A rail that is lost unnoticed may take chunks that nobody waits for, so
        only another rail's chunk proves that, unless it is lost as well. (A receiver may come two windows further
        until it hears of a loss.)
        """
        with self._changed:
            self.posted.popleft()
            self.moved = time.monotonic()
            free = [chunk.slot]
            if self.lane_end.movable():
                slot = chunk.slot if self._key.sending else _NOWHERE
                self._kept.append(_Kept(chunk.position, chunk.length, slot, chunk.since))
                settled = self._settled()
                free = settled if self._key.sending else free
        for slot in free:
            self.lane_end.give(slot, read)

    def _settled(self) -> list[torch.Tensor]:
        """The slots of the oldest ones kept, as far as they are owed no more."""
        slots = []
        while self._has_come(self._kept[0]):
            slots.append(self._kept.popleft().slot)
        return slots

    def _has_come(self, oldest: _Kept) -> bool:
        """Whether the last chunk that was done proves that the oldest one kept is owed no more."""
        if not self._key.sending:
            return len(self._kept) > 2 * self._length
        others = self.lane_end.route(self._kept[-1].position) != self.lane_end.route(oldest.position)
        return others and len(self._kept) > self._length

    def stall(self) -> Stall | None:
        """The chunk that is waited for, and since when nothing came: behind others on slow rails it is not late."""
        with self._changed:
            if not self.posted or self.posted[0].done:
                return None
            chunk = self.posted[0]
            rail = self.lane_end.route(chunk.position)
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
            moving = [c for c in late if self.lane_end.route(c.position) == loss.rail]
            name = self.lane_end.lose(loss)
            if not name:
                return ""
            moved = [chunk.posted for chunk in moving if isinstance(chunk, Chunk)]
            for chunk in moving:
                self._again(chunk)
            self._changed.notify_all()
        self.lane_end.cut(loss.rail)
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
        slot = chunk.slot if self._key.sending else self.lane_end.take(chunk.length, chunk.position[1])
        if isinstance(chunk, Chunk) and not chunk.done:
            self._abandoned.append((chunk.slot, chunk.posted))
            self._start(chunk, slot)
            return
        # sent, or come all the same: what is sent again has to go somewhere
        self._abandoned.append((slot, self.lane_end.post(slot, chunk.length, chunk.position)))


_NOWHERE = torch.empty(0, dtype=torch.uint8)
