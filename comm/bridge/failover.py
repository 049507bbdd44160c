"""When one rail of several is lost: both ends agree on it through the store, and its chunks take the other rails.

A receiver that waits long for a chunk asks the sender; one that has sent the chunk a while ago declares the rail lost.
From the first chunk that the receiver lacks, both ends route what that rail would carry over the others, in one order.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetctl.comm.operation.recorder import RECORDER
from hetctl.comm.operation.work import Store

POLL_SECONDS = 0.5
STALL_SECONDS = 4.0  # a chunk that takes longer, at both ends, counts as lost
ASK_SECONDS = (2.0, 30.0)  # between questions about one chunk: doubled each time the sender has not sent it yet

Position = tuple[int, int]  # (operation, chunk)


@dataclass(frozen=True)
class Loss:
    """A rail that is used no more, and the first chunk of the lane that the receiver lacked then."""

    rail: int
    since: Position


def route(position: Position, rails: int, losses: Sequence[Loss]) -> tuple[int, int]:
    """The rail that a chunk takes, and the loss that moved it there (1, 2, ..; 0: its own rail).

    Chunks go in turn over the rails, and what a lost rail would carry in turn over those left.
    Each message begins one rail further than the one before it, so that many of one chunk use all rails too.
    """
    turn = sum(position)
    rail, moved = turn % rails, 0
    for number, loss in enumerate(losses, 1):
        if rail == loss.rail and position >= loss.since:
            left = remaining(rails, losses[:number])
            rail, moved = left[turn // rails % len(left)], number
    return rail, moved


def remaining(rails: int, losses: Sequence[Loss]) -> list[int]:
    """The rails that are not lost."""
    lost = {loss.rail for loss in losses}
    return [rail for rail in range(rails) if rail not in lost]


@dataclass(frozen=True)
class Stall:
    """The chunk that a receiver waits for: on which rail, for how long, and whether that rail broke by itself."""

    position: Position
    rail: int
    seconds: float
    broken: bool


class Movable(Protocol):
    """What the watch needs of a lane's chunks."""

    def stall(self) -> Stall | None: ...

    def is_late(self, position: Position) -> bool:
        """Whether a chunk was given to its rail long ago; not when it was not yet."""

    def lose(self, loss: Loss) -> str:
        """Use a rail no more; its name, '' where it is the last one or lost already."""


@dataclass
class _Receiver:
    peer: int
    lane: Movable
    question: int | None = None  # the number of the one that is not answered
    about: Position | None = None
    pause: float = ASK_SECONDS[0]
    next: float = 0.0


@dataclass
class RailWatch:
    """One group's watch over its lanes with several rails; its thread starts with the first of them."""

    rank: int
    store: Store
    who: Callable[[int], str]
    _sending: dict[str, tuple[int, Movable]] = field(default_factory=dict)
    _receiving: dict[str, _Receiver] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def add(self, name: str, peer: int, lane: Movable, *, sending: bool) -> None:
        """Watch over a lane, called `name` by both ends."""
        with self._lock:
            if sending:
                self._sending[name] = (peer, lane)
            else:
                self._receiving[name] = _Receiver(peer, lane)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="het rails", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Watch no more; returns at once."""
        self._stop.set()

    def close(self, *, seconds: float = 5.0) -> None:
        """End the thread; it is waited for so long."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)
        with self._lock:  # their rails end with their lanes
            self._sending, self._receiving = {}, {}

    def _run(self) -> None:
        try:
            store, answered = self.store, 0
            while not self._stop.wait(POLL_SECONDS):
                asked = store.add(f"rails/asked/{self.rank}", 0)
                while answered < asked and store.check([f"rails/ask/{self.rank}/{answered + 1}"]):
                    answered += 1
                    self._answer(store, answered)
                for name, receiver in list(self._receiving.items()):
                    self._hear(store, receiver)
                    self._ask(store, name, receiver)
        except Exception as error:  # the store is gone, which the group's alarm reports; rails are watched no more
            if not self._stop.is_set():
                RECORDER.note(f"rails are watched no more: {error}"[:200])

    def _ask(self, store: Store, name: str, receiver: _Receiver) -> None:
        """Ask the sender about a chunk that is late."""
        stall, now = receiver.lane.stall(), time.monotonic()
        if stall is None or receiver.question is not None or not (stall.broken or stall.seconds > STALL_SECONDS):
            return
        if stall.position != receiver.about:
            receiver.about, receiver.pause, receiver.next = stall.position, ASK_SECONDS[0], 0.0
        if now < receiver.next:
            return
        receiver.next, receiver.pause = now + receiver.pause, min(2 * receiver.pause, ASK_SECONDS[1])
        peer = receiver.peer
        receiver.question = store.add(f"rails/numbers/{peer}", 1)
        question = {"lane": name, "position": stall.position, "rail": stall.rail, "broken": stall.broken}
        store.set(f"rails/ask/{peer}/{receiver.question}", json.dumps(question))
        store.add(f"rails/asked/{peer}", 1)

    def _answer(self, store: Store, number: int) -> None:
        """Decide about a receiver's question: 'lost' once this end moved what the rail carried, else 'no'."""
        question = json.loads(store.get(f"rails/ask/{self.rank}/{number}"))
        peer, lane = self._sending.get(question["lane"], (0, None))
        operation, chunk = question["position"]
        loss, answer = Loss(question["rail"], (operation, chunk)), "no"
        if lane is not None:
            lost = lane.lose(loss) if question["broken"] or lane.is_late(loss.since) else ""
            if lost:
                answer = "lost"
                self._say(lost, "to", peer)
        store.set(f"rails/answer/{self.rank}/{number}", json.dumps([answer, loss.rail, loss.since]))

    def _hear(self, store: Store, receiver: _Receiver) -> None:
        """Do as the sender did, once it has answered."""
        key = f"rails/answer/{receiver.peer}/{receiver.question}"
        if receiver.question is None or not store.check([key]):
            return
        answer, rail, (operation, chunk) = json.loads(store.get(key))
        receiver.question = None
        if answer == "lost":
            self._say(receiver.lane.lose(Loss(rail, (operation, chunk))), "from", receiver.peer)

    def _say(self, rail: str, way: str, peer: int) -> None:
        say(f"{rail} {way} {self.who(peer)} is lost; its chunks go over the other rails")


def say(sentence: str) -> None:
    """Let people and the flight recorder know what became of a rail."""
    RECORDER.note(sentence)
    warnings.warn(sentence, stacklevel=2)
