"""Received slots that a device may still read: freed in order, as soon as it has passed the event behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

LAG = 2  # slots that may wait for the device before the receiver waits for it


class SlotReleases:
    """Calls `free` once for each slot given back, oldest first."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free
        self._events: deque[Any] = deque()

    def give(self, event: Any) -> None:
        """A slot whose reader is `event` (None: it is read)."""
        self._events.append(event)
        while self._events and (len(self._events) > LAG or _passed(self._events[0])):
            self._oldest()

    def idle(self) -> None:
        """Free every slot, waiting for the device: there is nothing else to do."""
        while self._events:
            self._oldest()

    def _oldest(self) -> None:
        event = self._events.popleft()
        if event is not None:
            event.synchronize()
        self._free()


def _passed(event: Any) -> bool:
    return event is None or bool(event.query())
